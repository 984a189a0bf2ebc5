/* Streams. */
#include "driver.h"

#include <stdlib.h>

/* The stream behind a handle in the current context, of which NULL and CU_STREAM_LEGACY are the legacy stream. */
Stream *stream_of(CUstream handle, CUresult *result) {
    Context *context = current_context();
    *result = CUDA_SUCCESS;
    if (!handle || handle == CU_STREAM_LEGACY) {
        if (blocking_capture(context)) {
            invalidate_captures(context);
            *result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        return context->legacy;
    }
    Stream *stream = object_of(STREAMS, handle);
    if (!stream || !stream->live || stream->context != context)
        *result = CUDA_ERROR_INVALID_HANDLE;
    else if (stream->capture && stream->capture->invalid)
        *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return stream;
}

CUresult CUDAAPI cuStreamCreate(CUstream *handle, unsigned int flags) {
    ENTER(CALL)
    if (flags > CU_STREAM_NON_BLOCKING)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.live = true, .blocking = flags != CU_STREAM_NON_BLOCKING, .context = current_context()};
    *handle = new_object(STREAMS, stream);
    return leave(CUDA_SUCCESS);
}

/* Returns at once. What the stream still holds remains to be done. */
CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    ENTER(INITIALIZED | CONTEXT | TEARDOWN)
    Stream *stream = object_of(STREAMS, handle);
    if (!stream || !stream->live)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture)
        drop_capture(stream->capture);
    stream->live = false;
    return leave(state.sticky);
}

/* The stream to wait for: a capturing one has nothing to wait for, and a capture may forbid it. */
static Stream *waitable(CUstream handle, CUresult *result) {
    Stream *stream = stream_of(handle, result);
    if (!*result && stream->capture)
        stream->capture->invalid = true;
    if (!*result && (stream->capture || forbids_unsafe_calls()))
        *result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return stream;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    ENTER(CALL | WAITS)
    Stream *stream = waitable(handle, &result);
    if (!result) {
        if (stream->legacy) /* waits for blocking streams even if nothing was submitted to it */
            submit(stream, (Operation){.kind = NOTHING});
        result = finish(stream, state.sequence);
    }
    return leave(result);
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    ENTER(CALL)
    Stream *stream = waitable(handle, &result);
    if (result)
        return leave(result);
    if (pending(stream) && ++stream->queries % QUERIES_UNTIL_PROGRESS == 0)
        try_finish(stream, state.sequence);
    return leave(state.sticky ? state.sticky : pending(stream) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
    ENTER(CALL)
    Stream *stream = stream_of(handle, &result);
    Event *event = object_of(EVENTS, event_handle);
    if (!result && (!event || !event->live))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (!result && flags)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result || !event->record)
        return leave(result);
    if (stream->capture || event->record->capture_number)
        return leave(capture_wait(stream, event->record));
    return leave(submit(stream, (Operation){.kind = WAIT, .record = use_record(event->record)}));
}

