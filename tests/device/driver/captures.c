/* Stream capture: from cuStreamBeginCapture to cuStreamEndCapture. */
#include "driver.h"

#include <stdlib.h>

/* The next stream, from an index on, that takes part in a capture. */
static Stream *next_capturing(size_t *index) {
    while (*index < handles(STREAMS)) {
        Stream *stream = object_at(STREAMS, (*index)++);
        if (stream->capture)
            return stream;
    }
    return NULL;
}

/* Whether unsafe calls of this thread are forbidden: by any global capture, or by its own unless that is relaxed. */
static bool forbids(const Capture *capture) {
    return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
           (capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && pthread_equal(capture->thread, pthread_self()));
}

bool forbids_unsafe_calls(void) {
    Stream *stream;
    bool result = false;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (forbids(stream->capture))
            result = stream->capture->invalid = true;
    return result;
}

void invalidate_captures(const Context *context) {
    Stream *stream;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (stream->context == context)
            stream->capture->invalid = true;
}

bool captures_in(const Context *context) {
    Stream *stream;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (stream->context == context)
            return true;
    return false;
}

bool blocking_capture(const Context *context) {
    Stream *stream;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (stream->context == context && stream->blocking)
            return true;
    return false;
}

static bool joined(const Capture *capture) {
    Stream *stream;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (stream->capture == capture && stream != capture->origin && stream->nodes > stream->joined)
            return false;
    return true;
}

/* Ends a capture: its streams execute again. */
void drop_capture(Capture *capture) {
    Stream *stream;
    for (size_t i = 0; (stream = next_capturing(&i));)
        if (stream->capture == capture)
            stream->capture = NULL;
    release_graph(capture->graph);
    free(capture);
}

CUresult capture_operation(Stream *stream, const Operation *operation) {
    if (operation->kind == LAUNCH) /* a child graph */
        for (size_t i = 0; i < operation->graph->count; i++)
            add_node(stream->capture->graph, &operation->graph->nodes[i]);
    else
        add_node(stream->capture->graph, operation);
    if (operation->graph)
        release_graph(operation->graph);
    stream->nodes++;
    return CUDA_SUCCESS;
}

/* Makes a stream wait for a recording where at least one of the two belongs to a capture. */
CUresult capture_wait(Stream *stream, const Record *record) {
    Capture *capture = record->stream->capture;
    bool current = capture && capture->number == record->capture_number;
    if (stream->capture && stream->capture != capture) {
        stream->capture->invalid = true;
        if (current)
            capture->invalid = true;
        return current ? CUDA_ERROR_STREAM_CAPTURE_MERGE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!current) /* the event was recorded in a capture that has ended */
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    if (!stream->capture) {
        stream->capture = capture;
        stream->nodes = stream->joined = 0;
    }
    if (stream != record->stream) {
        if (record->node > record->stream->joined)
            record->stream->joined = record->node;
        stream->nodes++;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    ENTER(CALL)
    if (!handle || handle == CU_STREAM_LEGACY)
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    Stream *stream = stream_of(handle, &result);
    if (!result && mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result && stream->capture)
        result = CUDA_ERROR_ILLEGAL_STATE;
    if (result)
        return leave(result);
    Graph *graph = calloc(1, sizeof *graph);
    graph->uses = 1;
    Capture *capture = calloc(1, sizeof *capture);
    *capture = (Capture){.number = ++state.captures, .mode = mode, .thread = pthread_self(), .origin = stream, .graph = graph};
    stream->capture = capture;
    stream->nodes = stream->joined = 0;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    ENTER(CALL)
    *graph = NULL;
    Stream *stream = object_of(STREAMS, handle);
    if (!stream || !stream->live)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    Capture *capture = stream->capture;
    if (!capture)
        return leave(CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin != stream) {
        capture->invalid = true;
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (!result && !joined(capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (!result) {
        capture->graph->uses++;
        capture->graph->live = true;
        *graph = new_object(GRAPHS, capture->graph);
    }
    drop_capture(capture);
    return leave(result);
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    ENTER(CALL)
    Stream *stream = object_of(STREAMS, handle);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!handle || handle == CU_STREAM_LEGACY)
        return leave(blocking_capture(current_context()) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS);
    if (!stream || !stream->live)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture)
        *status = stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return leave(CUDA_SUCCESS);
}
