/* Initialisation, and the one device. */
#include "driver.h"

#include <string.h>

CUresult CUDAAPI cuInit(unsigned int flags) {
    ENTER(ANYTIME)
    if (flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (state.forked)
        return leave(CUDA_ERROR_NOT_INITIALIZED);
    if (!state.devices)
        return leave(CUDA_ERROR_NO_DEVICE);
    state.initialized = true;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    ENTER(INITIALIZED)
    *count = state.devices;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(INITIALIZED)
    *device = 0;
    return leave(ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

static CUresult enter_device(const char *function, CUdevice device) {
    CUresult result = enter(function, INITIALIZED);
    return result || device == 0 ? result : leave(CUDA_ERROR_INVALID_DEVICE);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device) {
    CUresult result = enter_device(__func__, device);
    if (result)
        return result;
    strncpy(name, "Software device", (size_t)length);
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    CUresult result = enter_device(__func__, device);
    if (result)
        return result;
    *major = 8;
    *minor = 7;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    CUresult result = enter_device(__func__, device);
    if (result)
        return result;
    *bytes = state.capacity_bytes;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    CUresult result = enter_device(__func__, device);
    if (result)
        return result;
    strncpy(id, "0000:00:00.0", (size_t)length);
    return leave(CUDA_SUCCESS);
}

/* Values of a Jetson Orin Nano; the others are 0. Unified addressing is among them, since the device's addresses are not
   the host's. */
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    static const struct {
        CUdevice_attribute attribute;
        int value;
    } values[] = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1020000},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3199000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 128},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 2 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 1536},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 7},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    };
    CUresult result = enter_device(__func__, device);
    if (result)
        return result;
    if (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *value = 0;
    for (size_t i = 0; i < COUNT(values); i++)
        if (values[i].attribute == attribute)
            *value = values[i].value;
    return leave(CUDA_SUCCESS);
}
