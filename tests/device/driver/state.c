/* The lock, the handles, and the entry and exit of every function. */
#include "driver.h"

#include <stdlib.h>

State state;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void lock_state(void) { pthread_mutex_lock(&mutex); }
void unlock_state(void) { pthread_mutex_unlock(&mutex); }

/* Handles. They are no addresses of the host, and none is used twice. */

static struct {
    void **objects;
    size_t count, room;
} tables[HANDLE_KINDS];

#define HANDLE_BASE 0x00d1000000000000u

void *new_object(HandleKind kind, void *object) {
    if (tables[kind].count == tables[kind].room) {
        tables[kind].room = tables[kind].room ? 2 * tables[kind].room : 64;
        tables[kind].objects = realloc(tables[kind].objects, tables[kind].room * sizeof(void *));
    }
    tables[kind].objects[tables[kind].count++] = object;
    return handle_of(kind, object);
}

void *handle_of(HandleKind kind, const void *object) {
    for (size_t i = tables[kind].count; i > 0; i--)
        if (tables[kind].objects[i - 1] == object)
            return (void *)(uintptr_t)(HANDLE_BASE | ((uint64_t)(kind + 1) << 40) | ((i - 1) << 8));
    return NULL;
}

void *object_of(HandleKind kind, const void *handle) {
    uint64_t base = HANDLE_BASE | ((uint64_t)(kind + 1) << 40), value = (uintptr_t)handle;
    if (value < base || (value - base) & 0xff || (value - base) >> 8 >= tables[kind].count)
        return NULL;
    return tables[kind].objects[(value - base) >> 8];
}

size_t handles(HandleKind kind) { return tables[kind].count; }
void *object_at(HandleKind kind, size_t index) { return tables[kind].objects[index]; }

/* The child of a process that uses CUDA cannot. */
static void after_fork(void) {
    pthread_mutex_init(&mutex, NULL);
    state.forked = state.initialized || state.forked;
    state.initialized = false;
}

__attribute__((constructor)) static void watch_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

/* Entry and exit of every function of the API. */

static CUresult check(const char *function, unsigned conditions) {
    if (conditions & INITIALIZED && !state.initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (conditions & WAITS && in_kernel) {
        defect("%s was called inside a kernel", function);
        return CUDA_ERROR_NOT_PERMITTED;
    }
    CUresult result = fail_now(function);
    if (result && !(conditions & TEARDOWN && is_sticky(result)))
        return result;
    if (conditions & CONTEXT && (result = check_context()))
        return result;
    if (conditions & HEALTHY && state.sticky)
        return state.sticky;
    if (conditions & USES_LEGACY && blocking_capture(current_context())) {
        invalidate_captures(current_context());
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (conditions & UNSAFE && forbids_unsafe_calls())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

CUresult enter(const char *function, unsigned conditions) {
    lock_state();
    count_call(function);
    CUresult result = check(function, conditions);
    if (result)
        unlock_state();
    return result;
}

CUresult leave(CUresult result) {
    unlock_state();
    return result;
}
