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

#define ENTER_DEVICE(device)                                                                                           \
    ENTER(INITIALIZED)                                                                                                 \
    if (device)                                                                                                        \
        return leave(CUDA_ERROR_INVALID_DEVICE);

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER_DEVICE(device)
    strncpy(name, "Software device", (size_t)length);
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    ENTER_DEVICE(device)
    *major = 8;
    *minor = 7;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER_DEVICE(device)
    *bytes = state.capacity_bytes;
    return leave(CUDA_SUCCESS);
}

/* Of a Jetson Orin Nano, as far as somebody asks. */
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER_DEVICE(device)
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        *value = 8;
    else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        *value = 7;
    else if (attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED)
        *value = 1;
    else
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    return leave(CUDA_SUCCESS);
}
