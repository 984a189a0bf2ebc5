/* Copies and fills, with the synchronisation that the documentation of each transfer states and no more. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static Place host_place(const void *host, size_t size) {
    return (Place){region_of_host(host, size) ? IN_PINNED_MEMORY : IN_PAGEABLE_MEMORY, (uintptr_t)host};
}

static Place device_place(CUdeviceptr address) { return (Place){ON_DEVICE, address}; }

/* The driver refuses a range that is not inside one live allocation when the copy is submitted. */
static bool valid(Place place, size_t size) {
    if (place.kind == ON_DEVICE)
        return region_of_device(place.address, size);
    const void *host = (const void *)(uintptr_t)place.address;
    /* A range that begins in pinned memory and leaves it is pinned in part. */
    return host && !(place.kind == IN_PAGEABLE_MEMORY && region_of_host(host, 0));
}

static void *staged(Place source, size_t size) {
    void *copy = malloc(size);
    return memcpy(copy, (const void *)(uintptr_t)source.address, size);
}

/* Asynchronous to the host, except that pageable memory is staged at once or waited for, as CUDA does. */
static CUresult copy_async(const char *function, Place destination, Place source, size_t size, CUstream handle) {
    CUresult result = CUDA_SUCCESS;
    Stream *stream = stream_of(handle, &result);
    if (result || !size)
        return result;
    if (!valid(destination, size) || !valid(source, size))
        return CUDA_ERROR_INVALID_VALUE;
    Operation operation = {.kind = COPY, .destination = destination, .source = source, .size = size};
    bool pageable = destination.kind == IN_PAGEABLE_MEMORY || source.kind == IN_PAGEABLE_MEMORY;
    if (pageable) {
        defect("%s of %zu bytes uses memory that is not pinned: it is not asynchronous", function, size);
        if (stream->capture) {
            stream->capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    if (source.kind == IN_PAGEABLE_MEMORY)
        operation.staged = staged(source, size);
    result = submit(stream, operation);
    return !result && destination.kind == IN_PAGEABLE_MEMORY ? finish(stream, state.sequence) : result;
}

/* On the legacy stream. Only a copy between pageable memory and the device, or within the device, may still be under
   way when the function returns. */
static CUresult copy_sync(Place destination, Place source, size_t size) {
    Stream *legacy = current_context()->legacy;
    if (!size)
        return CUDA_SUCCESS;
    if (!valid(destination, size) || !valid(source, size))
        return CUDA_ERROR_INVALID_VALUE;
    Operation operation = {.kind = COPY, .destination = destination, .source = source, .size = size};
    CUresult result = CUDA_SUCCESS;
    if (source.kind == IN_PAGEABLE_MEMORY) {
        result = submit(legacy, (Operation){.kind = NOTHING});
        if (!result)
            result = finish(legacy, state.sequence);
        if (result)
            return result;
        operation.staged = staged(source, size);
    }
    result = submit(legacy, operation);
    bool waits = destination.kind != ON_DEVICE || source.kind == IN_PINNED_MEMORY;
    return !result && waits ? finish(legacy, state.sequence) : result;
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr destination, const void *source, size_t size) {
    ENTER(CALL | WAITS | USES_LEGACY | UNSAFE)
    return leave(copy_sync(device_place(destination), host_place(source, size), size));
}

CUresult CUDAAPI cuMemcpyDtoH(void *destination, CUdeviceptr source, size_t size) {
    ENTER(CALL | WAITS | USES_LEGACY | UNSAFE)
    return leave(copy_sync(host_place(destination, size), device_place(source), size));
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr destination, const void *source, size_t size, CUstream stream) {
    ENTER(CALL)
    return leave(copy_async("cuMemcpyHtoDAsync", device_place(destination), host_place(source, size), size, stream));
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *destination, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER(CALL)
    return leave(copy_async("cuMemcpyDtoHAsync", host_place(destination, size), device_place(source), size, stream));
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr destination, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER(CALL)
    return leave(copy_async("cuMemcpyDtoDAsync", device_place(destination), device_place(source), size, stream));
}

/* Within the device alone, and without offsets. */
CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D *copy, CUstream handle) {
    ENTER(CALL)
    Stream *stream = stream_of(handle, &result);
    bool within = copy->srcMemoryType == CU_MEMORYTYPE_DEVICE && copy->dstMemoryType == CU_MEMORYTYPE_DEVICE;
    bool offset = copy->srcXInBytes || copy->srcY || copy->srcZ || copy->dstXInBytes || copy->dstY || copy->dstZ;
    if (result || !within || offset)
        return leave(result ? result : CUDA_ERROR_NOT_SUPPORTED);
    size_t width = copy->WidthInBytes, height = copy->Height, depth = copy->Depth;
    if (!width || !height || !depth)
        return leave(CUDA_SUCCESS);
    bool far = copy->srcPitch > INT32_MAX || copy->dstPitch > INT32_MAX; /* MAX_PITCH */
    if (far || copy->srcPitch < width || copy->dstPitch < width || copy->srcHeight < height || copy->dstHeight < height)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Parts parts = {.width = width, .height = height, .depth = depth,
                   .destination_pitch = copy->dstPitch, .destination_slice = copy->dstPitch * copy->dstHeight,
                   .source_pitch = copy->srcPitch, .source_slice = copy->srcPitch * copy->srcHeight};
    size_t to = (depth - 1) * parts.destination_slice + (height - 1) * parts.destination_pitch + width;
    size_t from = (depth - 1) * parts.source_slice + (height - 1) * parts.source_pitch + width;
    Operation operation = {.kind = COPY, .destination = device_place(copy->dstDevice),
                           .source = device_place(copy->srcDevice), .parts = parts};
    if (!valid(operation.destination, to) || !valid(operation.source, from))
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(submit(stream, operation));
}

static CUresult fill(CUdeviceptr destination, unsigned char value, size_t size, CUstream handle) {
    CUresult result = CUDA_SUCCESS;
    Stream *stream = stream_of(handle, &result);
    if (result || !size)
        return result;
    Place place = device_place(destination);
    if (!valid(place, size))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, (Operation){.kind = FILL, .destination = place, .size = size, .value = value});
}

/* On the legacy stream. Asynchronous, too, unless it fills pinned memory. */
CUresult CUDAAPI cuMemsetD8(CUdeviceptr destination, unsigned char value, size_t size) {
    ENTER(CALL | WAITS | USES_LEGACY)
    result = fill(destination, value, size, NULL);
    Region *region = region_of_device(destination, 0);
    bool waits = !result && region && region->kind != DEVICE_MEMORY;
    return leave(waits ? finish(current_context()->legacy, state.sequence) : result);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t size, CUstream stream) {
    ENTER(CALL)
    return leave(fill(destination, value, size, stream));
}

