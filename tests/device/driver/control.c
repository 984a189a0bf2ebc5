/* The functions that tests and the double of TensorRT call, and the texts of the errors. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

void *software_translate(uint64_t address, size_t size);
int software_launch(CUstream stream, Kernel kernel, void *userdata);
size_t software_allocations(void);
size_t software_allocated_bytes(void);
long software_live_objects(const char *kind);
size_t software_pending(void);
void software_set_memory(size_t bytes);
int software_error(void);
void software_report(const char *text);
void software_clear(void);
void software_reset(void);

/* The host's address of a range of the device's memory, NULL unless it is inside one live allocation. */
void *software_translate(uint64_t address, size_t size) {
    lock_state();
    Region *region = region_of_device(address, size);
    void *host = region ? region->host + (address - region->address) : NULL;
    unlock_state();
    return host;
}

int software_launch(CUstream handle, Kernel kernel, void *userdata) {
    ENTER(CALL)
    Stream *stream = stream_of(handle, &result);
    if (!result)
        result = submit(stream, (Operation){.kind = KERNEL, .kernel = kernel, .userdata = userdata});
    return leave(result);
}

static size_t regions(RegionKind kind) {
    size_t count = 0;
    for (const Region *region = state.regions; region; region = region->next)
        count += region->kind == kind;
    return count;
}

/* Allocations of device memory and of pinned memory. */
size_t software_allocations(void) {
    lock_state();
    size_t result = regions(DEVICE_MEMORY) + regions(PINNED_MEMORY);
    unlock_state();
    return result;
}

size_t software_allocated_bytes(void) {
    lock_state();
    size_t result = state.used_bytes;
    unlock_state();
    return result;
}

static bool live(HandleKind kind, const void *object) {
    switch (kind) {
    case CONTEXTS:
        return ((const Context *)object)->live;
    case STREAMS:
        return ((const Stream *)object)->live;
    case EVENTS:
        return ((const Event *)object)->live;
    default:
        return ((const Graph *)object)->live;
    }
}

/* Live objects of a kind: device, pinned, registered, context, stream, event, graph, executable. -1 for others. */
long software_live_objects(const char *kind) {
    static const char *const memory[REGION_KINDS] = {"device", "pinned", "registered"};
    static const char *const objects[HANDLE_KINDS] = {"context", "stream", "event", "graph", "executable"};
    long result = -1;
    lock_state();
    for (RegionKind one = 0; one < REGION_KINDS; one++)
        if (!strcmp(kind, memory[one]))
            result = (long)regions(one);
    for (HandleKind one = 0; one < HANDLE_KINDS; one++)
        if (!strcmp(kind, objects[one])) {
            result = 0;
            for (size_t i = 0; i < handles(one); i++)
                result += live(one, object_at(one, i));
        }
    unlock_state();
    return result;
}

size_t software_pending(void) {
    lock_state();
    size_t result = pending_operations();
    unlock_state();
    return result;
}

void software_set_memory(size_t bytes) {
    lock_state();
    state.capacity_bytes = bytes;
    unlock_state();
}

/* The sticky error, or 0. */
int software_error(void) {
    lock_state();
    int result = state.sticky;
    unlock_state();
    return result;
}

/* Adds a defect that the double of TensorRT found. */
void software_report(const char *text) {
    lock_state();
    defect("%s", text);
    unlock_state();
}

/* Forgets injected errors and defects, and reads the environment again. */
void software_clear(void) {
    lock_state();
    clear_injections();
    clear_defects();
    unlock_state();
    read_environment();
}

/* What a new process would find: no error, no injected error, no object, the memory of the environment. */
void software_reset(void) {
    lock_state();
    for (size_t i = 0; i < handles(CONTEXTS); i++) {
        Context *context = object_at(CONTEXTS, i);
        if (context->live)
            destroy_context(context);
    }
    for (size_t i = 0; i < handles(GRAPHS); i++)
        ((Graph *)object_at(GRAPHS, i))->live = false;
    for (size_t i = 0; i < handles(EXECUTABLES); i++)
        ((Graph *)object_at(EXECUTABLES, i))->live = false;
    state.primary_uses = 0;
    state.sticky = CUDA_SUCCESS;
    state.generation++;
    unlock_state();
    software_clear();
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define ERROR(name, text) {name, #name, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_ASSERT, "device-side assert triggered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    ERROR(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
    ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(CUDA_ERROR_INVALID_ADDRESS_SPACE, "operation not supported on global/shared address space"),
    ERROR(CUDA_ERROR_INVALID_PC, "invalid program counter"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < COUNT(errors); i++)
        if (errors[i].code == error) {
            *text = errors[i].text;
            return CUDA_SUCCESS;
        }
    *text = "unrecognized error code"; /* pycuda prints it without looking at the result */
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < COUNT(errors); i++)
        if (errors[i].code == error) {
            *name = errors[i].name;
            return CUDA_SUCCESS;
        }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
