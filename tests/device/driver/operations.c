/* The queues of the streams: work waits in them until a host thread synchronises. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Held by the thread that executes work. Taken before the lock of the state, which kernels run without. */
static pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;

_Thread_local bool in_kernel;

Record *use_record(Record *record) {
    record->uses++;
    return record;
}

void release_record(Record *record) {
    if (record && --record->uses == 0)
        free(record);
}

static void release_operation(Operation *operation) {
    free(operation->staged);
    release_record(operation->record);
    if (operation->graph)
        release_graph(operation->graph);
    free(operation);
}

bool pending(const Stream *stream) { return stream->first || stream->running; }

void discard(Stream *stream) {
    while (stream->first) {
        Operation *operation = stream->first;
        stream->first = operation->next;
        if (operation->kind == RECORD)
            operation->record->done = true;
        release_operation(operation);
    }
    stream->last = NULL;
}

/* Appends to the queue, or to the graph while the stream captures. Takes over `staged`, `record` and `graph`. */
CUresult submit(Stream *stream, Operation operation) {
    if (stream->capture)
        return capture_operation(stream, &operation);
    Operation *queued = malloc(sizeof *queued);
    *queued = operation;
    queued->next = NULL;
    queued->sequence = ++state.sequence;
    if (stream->last)
        stream->last->next = queued;
    else
        stream->first = queued;
    stream->last = queued;
    stream->queries = 0;
    return CUDA_SUCCESS;
}

/* The memory of the host behind a place, or NULL if it is freed by now. */
static unsigned char *resolve(Place place, size_t size) {
    unsigned char *host = (unsigned char *)(uintptr_t)place.address;
    if (place.kind == IN_PINNED_MEMORY)
        return region_of_host(host, size) ? host : NULL;
    if (place.kind == IN_PAGEABLE_MEMORY)
        return host;
    Region *region = region_of_device(place.address, size);
    return region ? region->host + (place.address - region->address) : NULL;
}

static CUresult copy_parts(const Operation *operation) {
    const Parts *parts = &operation->parts;
    for (size_t z = 0; z < parts->depth; z++)
        for (size_t y = 0; y < parts->height; y++) {
            Place to = operation->destination, from = operation->source;
            to.address += z * parts->destination_slice + y * parts->destination_pitch;
            from.address += z * parts->source_slice + y * parts->source_pitch;
            unsigned char *destination = resolve(to, parts->width), *source = resolve(from, parts->width);
            if (!destination || !source)
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            memmove(destination, source, parts->width);
        }
    return CUDA_SUCCESS;
}

static CUresult copy(const Operation *operation) {
    if (operation->parts.height)
        return copy_parts(operation);
    unsigned char *destination = resolve(operation->destination, operation->size);
    const unsigned char *source = operation->staged ? operation->staged : resolve(operation->source, operation->size);
    if (!destination || !source)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove(destination, source, operation->size);
    return CUDA_SUCCESS;
}

static CUresult fill(const Operation *operation) {
    unsigned char *destination = resolve(operation->destination, operation->size);
    if (!destination)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memset(destination, operation->value, operation->size);
    return CUDA_SUCCESS;
}

static CUresult call(const Operation *operation) {
    CUresult result = fail_now("kernel");
    if (result)
        return result;
    Operation copied = *operation;
    unlock_state();
    in_kernel = true;
    result = copied.kernel(copied.userdata);
    in_kernel = false;
    lock_state();
    return result;
}

static void record_now(Record *record) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    record->time_ms = 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
    record->done = true;
}

/* Errors of the device are sticky: the next call that looks returns them. */
static void execute(const Operation *operation) {
    CUresult result = CUDA_SUCCESS;
    if (operation->kind == RECORD)
        record_now(operation->record);
    else if (state.sticky)
        return;
    else if (operation->kind == COPY)
        result = copy(operation);
    else if (operation->kind == FILL)
        result = fill(operation);
    else if (operation->kind == KERNEL)
        result = call(operation);
    else if (operation->kind == LAUNCH)
        for (size_t i = 0; i < operation->graph->count; i++)
            execute(&operation->graph->nodes[i]);
    if (result)
        raise_sticky(result);
}

static void run(Stream *stream, uint64_t sequence);

/* The legacy stream and blocking streams wait for each other; a wait for an event waits for what it recorded. */
static void run_predecessors(Stream *stream, const Operation *operation) {
    uint64_t before = operation->sequence - 1;
    if (stream->legacy) {
        for (size_t i = 0; i < handles(STREAMS); i++) {
            Stream *other = object_at(STREAMS, i);
            if (other->blocking && other->context == stream->context)
                run(other, before);
        }
    } else if (stream->blocking)
        run(stream->context->legacy, before);
    if (operation->kind == WAIT)
        run(operation->record->stream, operation->record->sequence);
}

/* Executes a stream in order up to an operation, and from other streams only what must precede it. */
static void run(Stream *stream, uint64_t sequence) {
    while (stream->first && stream->first->sequence <= sequence) {
        Operation *operation = stream->first;
        stream->first = operation->next;
        if (!stream->first)
            stream->last = NULL;
        stream->running = true;
        run_predecessors(stream, operation);
        execute(operation);
        stream->running = false;
        release_operation(operation);
    }
}

static void end_execution(void) {
    state.executing--;
    free_graveyard();
    pthread_mutex_unlock(&device);
}

/* Gives up the lock of the state while it waits for the device. */
static void wait_for_device(void) {
    unlock_state();
    pthread_mutex_lock(&device);
    lock_state();
    state.executing++;
}

CUresult finish(Stream *stream, uint64_t sequence) {
    wait_for_device();
    run(stream, sequence);
    end_execution();
    return state.sticky;
}

CUresult finish_context(Context *context) {
    uint64_t last = state.sequence;
    wait_for_device();
    for (size_t i = 0; i < handles(STREAMS); i++) {
        Stream *stream = object_at(STREAMS, i);
        if (stream->context == context)
            run(stream, last);
    }
    run(context->legacy, last);
    end_execution();
    return state.sticky;
}

/* For queries: executes unless another thread does, because the caller may hold what that thread needs. */
void try_finish(Stream *stream, uint64_t sequence) {
    if (in_kernel || pthread_mutex_trylock(&device))
        return;
    state.executing++;
    run(stream, sequence);
    end_execution();
}

size_t pending_operations(void) {
    size_t count = 0;
    for (size_t i = 0; i < handles(STREAMS); i++)
        for (Operation *one = ((Stream *)object_at(STREAMS, i))->first; one; one = one->next)
            count++;
    for (size_t i = 0; i < handles(CONTEXTS); i++)
        for (Operation *one = ((Context *)object_at(CONTEXTS, i))->legacy->first; one; one = one->next)
            count++;
    return count;
}
