/* The functions that tests and the double of TensorRT call. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

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

#define LOCKED(type, name, value)                                                                                      \
    type name(void) {                                                                                                  \
        lock_state();                                                                                                  \
        type result = (value);                                                                                         \
        unlock_state();                                                                                                \
        return result;                                                                                                 \
    }
LOCKED(size_t, software_allocated_bytes, state.used_bytes)
LOCKED(size_t, software_pending, pending_operations())
LOCKED(int, software_error, (int)state.sticky) /* or 0 */

/* Live objects of a kind: device, pinned, context, stream, event, graph, executable. -1 for others. */
long software_live_objects(const char *kind) {
    static const char *const memory[REGION_KINDS] = {"device", "pinned"};
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
                result += *(const bool *)object_at(one, i); /* `live` comes first in each */
        }
    unlock_state();
    return result;
}

void software_set_memory(size_t bytes) {
    lock_state();
    state.capacity_bytes = bytes;
    unlock_state();
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
    for (HandleKind kind = GRAPHS; kind <= EXECUTABLES; kind++)
        for (size_t i = 0; i < handles(kind); i++)
            ((Graph *)object_at(kind, i))->live = false;
    state.primary_uses = 0;
    state.sticky = CUDA_SUCCESS;
    state.generation++;
    unlock_state();
    software_clear();
}
