/* Events. */
#include "driver.h"

#include <stdlib.h>

CUresult CUDAAPI cuEventCreate(CUevent *handle, unsigned int flags) {
    ENTER(CALL)
    if (flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
        return leave(CUDA_ERROR_INVALID_VALUE);
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.live = true, .flags = flags, .context = current_context()};
    *handle = new_object(EVENTS, event);
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    ENTER(INITIALIZED | CONTEXT | TEARDOWN)
    Event *event = object_of(EVENTS, handle);
    if (!event || !event->live)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    event->live = false;
    release_record(event->record);
    event->record = NULL;
    return leave(state.sticky);
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream_handle) {
    ENTER(CALL)
    Event *event = object_of(EVENTS, handle);
    Stream *stream = stream_of(stream_handle, &result);
    if (!result && (!event || !event->live || event->context != stream->context))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result)
        return leave(result);
    Record *record = calloc(1, sizeof *record);
    *record = (Record){.uses = 1, .stream = stream};
    release_record(event->record);
    event->record = record;
    event->queries = 0;
    if (stream->capture) {
        record->capture_number = stream->capture->number;
        record->node = stream->nodes;
        return leave(CUDA_SUCCESS);
    }
    result = submit(stream, (Operation){.kind = RECORD, .record = use_record(record)});
    record->sequence = state.sequence;
    return leave(result);
}

/* The event behind a handle, unless it may be neither queried nor waited for. */
static Event *event_of(CUevent handle, CUresult *result) {
    Event *event = object_of(EVENTS, handle);
    if (!event || !event->live)
        *result = CUDA_ERROR_INVALID_HANDLE;
    else if (event->record && event->record->capture_number) {
        Capture *capture = event->record->stream->capture;
        if (capture && capture->number == event->record->capture_number)
            capture->invalid = true;
        *result = CUDA_ERROR_CAPTURED_EVENT;
    }
    return event;
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    ENTER(CALL | WAITS)
    Event *event = event_of(handle, &result);
    if (!result && forbids_unsafe_calls())
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!result && event->record) {
        Record *record = use_record(event->record);
        result = finish(record->stream, record->sequence);
        release_record(record);
    }
    return leave(result);
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    ENTER(CALL)
    Event *event = event_of(handle, &result);
    if (!result && forbids_unsafe_calls())
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result || !event->record)
        return leave(result);
    Record *record = use_record(event->record);
    if (!record->done && ++event->queries % QUERIES_UNTIL_PROGRESS == 0)
        try_finish(record->stream, record->sequence);
    result = state.sticky ? state.sticky : record->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    release_record(record);
    return leave(result);
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    ENTER(CALL)
    Event *start = event_of(start_handle, &result), *end = result ? NULL : event_of(end_handle, &result);
    if (result)
        return leave(result);
    if (!start->record || !end->record || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (!start->record->done || !end->record->done)
        return leave(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)(end->record->time_ms - start->record->time_ms);
    return leave(CUDA_SUCCESS);
}
