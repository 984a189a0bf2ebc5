/* Device and pinned memory behind addresses of the device that the host cannot dereference. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* New and freed memory holds it: NaN in every floating-point type, -1 in every integer. */
#define POISON 0xff
/* Not canonical on x86-64 and aarch64. */
#define FIRST_ADDRESS 0x00d0000000000000u
/* Between two allocations, so that no offset reaches from one into the next. */
#define GAP_BYTES ((uint64_t)1 << 20)

static uint64_t next_address = FIRST_ADDRESS;
static struct {
    unsigned char **blocks;
    size_t count;
} graveyard;

Region *region_of_device(uint64_t address, size_t size) {
    for (Region *region = state.regions; region; region = region->next)
        if (address >= region->address && address <= region->address + region->size &&
            size <= region->address + region->size - address && address < region->address + region->size)
            return region;
    return NULL;
}

Region *region_of_host(const void *host, size_t size) {
    const unsigned char *first = host;
    for (Region *region = state.regions; region; region = region->next)
        if (region->kind != DEVICE_MEMORY && first >= region->host && first < region->host + region->size &&
            size <= (size_t)(region->host + region->size - first))
            return region;
    return NULL;
}

/* Adds a region at an address that no region had before, aligned to 256 bytes as CUDA promises and to no more. */
static Region *add_region(RegionKind kind, unsigned char *host, size_t size, unsigned flags) {
    Region *region = calloc(1, sizeof *region);
    *region = (Region){.kind = kind, .address = next_address + 256, .host = host, .size = size, .flags = flags};
    region->context = current_context();
    region->next = state.regions;
    state.regions = region;
    next_address += (size + GAP_BYTES) / GAP_BYTES * GAP_BYTES + GAP_BYTES;
    state.used_bytes += size;
    return region;
}

static size_t page_rounded(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* Freed device memory stays readable for a kernel that is running, as poison. Freed pinned memory faults. */
void free_region(Region *region) {
    for (Region **link = &state.regions; *link; link = &(*link)->next)
        if (*link == region) {
            *link = region->next;
            break;
        }
    state.used_bytes -= region->size;
    if (region->kind == DEVICE_MEMORY) {
        memset(region->host, POISON, region->size);
        graveyard.blocks = realloc(graveyard.blocks, (graveyard.count + 1) * sizeof *graveyard.blocks);
        graveyard.blocks[graveyard.count++] = region->host;
        if (!state.executing)
            free_graveyard();
    } else /* the pages go, the addresses stay taken */
        mmap(region->host, page_rounded(region->size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
             -1, 0);
    free(region);
}

void free_graveyard(void) {
    while (graveyard.count)
        free(graveyard.blocks[--graveyard.count]);
}

static bool room_for(size_t size) { return size <= state.capacity_bytes && state.used_bytes <= state.capacity_bytes - size; }

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    ENTER(CALL | UNSAFE)
    if (!size)
        return leave(CUDA_ERROR_INVALID_VALUE);
    unsigned char *host = room_for(size) ? malloc(size) : NULL;
    if (!host)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    memset(host, POISON, size);
    *pointer = add_region(DEVICE_MEMORY, host, size, 0)->address;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr pointer) {
    ENTER(INITIALIZED | CONTEXT | TEARDOWN | UNSAFE)
    Region *region = region_of_device(pointer, 0);
    if (!pointer)
        return leave(state.sticky);
    if (!region || region->kind != DEVICE_MEMORY || region->address != pointer)
        return leave(CUDA_ERROR_INVALID_VALUE);
    free_region(region);
    return leave(state.sticky);
}

CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER(CALL)
    *free_bytes = state.used_bytes < state.capacity_bytes ? state.capacity_bytes - state.used_bytes : 0;
    *total_bytes = state.capacity_bytes;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostAlloc(void **pointer, size_t size, unsigned int flags) {
    ENTER(CALL | UNSAFE)
    if (!size || flags & ~(unsigned)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED))
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (!room_for(size))
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    void *host = mmap(NULL, page_rounded(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    memset(host, POISON, size);
    add_region(PINNED_MEMORY, host, size, flags);
    *pointer = host;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemFreeHost(void *pointer) {
    ENTER(INITIALIZED | CONTEXT | TEARDOWN | UNSAFE)
    Region *region = region_of_host(pointer, 0);
    if (!region || region->host != pointer)
        return leave(CUDA_ERROR_INVALID_VALUE);
    free_region(region);
    return leave(state.sticky);
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *device, void *pointer, unsigned int flags) {
    ENTER(CALL)
    Region *region = region_of_host(pointer, 0);
    if (!region || flags || !(region->flags & CU_MEMHOSTALLOC_DEVICEMAP))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *device = region->address + (uint64_t)((unsigned char *)pointer - region->host);
    return leave(CUDA_SUCCESS);
}

