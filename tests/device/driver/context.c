/* Contexts: current per thread, the primary one counted. */
#include "driver.h"

#include <stdlib.h>

/* The stack of contexts that are current to this thread, emptied by software_reset. */
static _Thread_local struct {
    unsigned generation, depth;
    Context *contexts[64];
} stack;

static void renew_stack(void) {
    if (stack.generation != state.generation) {
        stack.generation = state.generation;
        stack.depth = 0;
    }
}

Context *current_context(void) {
    renew_stack();
    return stack.depth ? stack.contexts[stack.depth - 1] : NULL;
}

CUresult check_context(void) {
    Context *context = current_context();
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return context->live ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static CUresult push(Context *context) {
    renew_stack();
    if (stack.depth == COUNT(stack.contexts))
        return CUDA_ERROR_INVALID_VALUE;
    stack.contexts[stack.depth++] = context;
    return CUDA_SUCCESS;
}

static Context *new_context(bool primary) {
    Context *context = calloc(1, sizeof *context);
    context->live = true;
    context->primary = primary;
    context->uses = 1;
    context->legacy = calloc(1, sizeof(Stream));
    *context->legacy = (Stream){.live = true, .legacy = true, .blocking = true, .context = context};
    new_object(CONTEXTS, context);
    return context;
}

/* Releases everything that was created in the context, as its destruction does. */
void destroy_context(Context *context) {
    for (Region *region = state.regions, *next; region; region = next) {
        next = region->next;
        if (region->context == context)
            free_region(region);
    }
    for (size_t i = 0; i < handles(STREAMS); i++) {
        Stream *stream = object_at(STREAMS, i);
        if (stream->context == context) {
            discard(stream);
            if (stream->capture)
                drop_capture(stream->capture);
            stream->live = false;
        }
    }
    discard(context->legacy);
    for (size_t i = 0; i < handles(EVENTS); i++) {
        Event *event = object_at(EVENTS, i);
        if (event->context == context)
            event->live = false;
    }
    context->live = false;
}

CUresult CUDAAPI cuCtxCreate(CUcontext *handle, unsigned int flags, CUdevice device) {
    (void)flags;
    ENTER(INITIALIZED | HEALTHY)
    if (device)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    Context *context = new_context(false);
    *handle = handle_of(CONTEXTS, context);
    return leave(push(context));
}

/* Destroys a context that the caller names, and pops it if it is current. */
static void destroy_and_pop(Context *context) {
    destroy_context(context);
    if (current_context() == context)
        stack.depth--;
}

CUresult CUDAAPI cuCtxDetach(CUcontext handle) {
    ENTER(INITIALIZED | CONTEXT | TEARDOWN)
    Context *context = object_of(CONTEXTS, handle);
    if (!context || context != current_context())
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--context->uses == 0)
        destroy_and_pop(context);
    return leave(state.sticky);
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext handle) {
    ENTER(INITIALIZED)
    Context *context = object_of(CONTEXTS, handle);
    if (!context)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    return leave(context->live ? push(context) : CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *handle) {
    ENTER(INITIALIZED)
    Context *context = current_context();
    if (!context)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (handle)
        *handle = handle_of(CONTEXTS, context);
    stack.depth--;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *handle) {
    ENTER(INITIALIZED)
    Context *context = current_context();
    *handle = context ? handle_of(CONTEXTS, context) : NULL;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxSynchronize(void) {
    ENTER(CALL | WAITS)
    if (captures_in(current_context())) {
        invalidate_captures(current_context());
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return leave(finish_context(current_context()));
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *handle, CUdevice device) {
    ENTER(INITIALIZED | HEALTHY)
    if (device)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    if (!state.primary_uses++)
        state.primary = new_context(true);
    *handle = handle_of(CONTEXTS, state.primary);
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(INITIALIZED | TEARDOWN)
    if (device)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    if (!state.primary_uses)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--state.primary_uses == 0)
        destroy_context(state.primary);
    return leave(state.sticky);
}

