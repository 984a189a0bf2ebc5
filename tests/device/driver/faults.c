/* Injected and sticky errors, the defects that tests read, and the counts of calls. */
#include "driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Injected errors: the nth call of a function from now on returns a code. */

typedef struct Injection {
    char function[64];
    long remaining;
    CUresult code;
    struct Injection *next;
} Injection;

static Injection *injections;

/* cuMemAlloc_v2, the name of the symbol, counts as cuMemAlloc, the name in the documentation. */
static size_t length_without_version(const char *name) {
    size_t length = strlen(name);
    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v')
        length -= 3;
    return length;
}

static bool same_function(const char *one, const char *other) {
    size_t length = length_without_version(one);
    return length == length_without_version(other) && !strncmp(one, other, length);
}

int software_fail(const char *function, long nth, int code) {
    if (nth < 1 || strlen(function) >= sizeof injections->function)
        return CUDA_ERROR_INVALID_VALUE;
    Injection *injection = calloc(1, sizeof *injection);
    strcpy(injection->function, function);
    injection->remaining = nth;
    injection->code = code;
    lock_state();
    injection->next = injections;
    injections = injection;
    unlock_state();
    return CUDA_SUCCESS;
}

void clear_injections(void) {
    while (injections) {
        Injection *next = injections->next;
        free(injections);
        injections = next;
    }
}

/* The injected error of this call of a function. */
CUresult fail_now(const char *function) {
    CUresult code = CUDA_SUCCESS;
    for (Injection *injection = injections; injection; injection = injection->next)
        if (same_function(injection->function, function) && --injection->remaining == 0)
            code = injection->code;
    return is_sticky(code) ? raise_sticky(code) : code;
}

/* Calls of each function, for tests that count graph launches or allocations. */

static struct {
    const char *function;
    unsigned long calls;
} calls[256];

void count_call(const char *function) {
    size_t i = 0;
    while (i < COUNT(calls) - 1 && calls[i].function && calls[i].function != function)
        i++;
    calls[i].function = function;
    calls[i].calls++;
}

unsigned long software_calls(const char *function) {
    unsigned long result = 0;
    lock_state();
    for (size_t i = 0; i < COUNT(calls) && calls[i].function; i++)
        if (same_function(calls[i].function, function))
            result += calls[i].calls;
    unlock_state();
    return result;
}

/* SOFTWARE_CUDA_FAIL=cuMemAlloc:3:2,cuStreamSynchronize:1:700  SOFTWARE_CUDA_MEMORY=bytes  SOFTWARE_CUDA_DEVICES=0 */
__attribute__((constructor)) void read_environment(void) {
    const char *fail = getenv("SOFTWARE_CUDA_FAIL"), *memory = getenv("SOFTWARE_CUDA_MEMORY"),
               *devices = getenv("SOFTWARE_CUDA_DEVICES");
    state.capacity_bytes = memory ? strtoull(memory, NULL, 10) : (size_t)7486 << 20; /* of an Orin Nano with JetPack 7 */
    state.devices = devices ? atoi(devices) : 1;
    char function[64];
    long nth;
    int code, length;
    while (fail && *fail) {
        if (sscanf(fail, "%63[^:]:%ld:%d%n", function, &nth, &code, &length) != 3 || software_fail(function, nth, code)) {
            fprintf(stderr, "SOFTWARE_CUDA_FAIL: got %s, expected function:nth:code[,...]\n", fail);
            abort();
        }
        fail += length;
        fail += *fail == ',';
    }
}

/* Errors after which CUDA requires a new process, and those that the driver treats alike. */
bool is_sticky(CUresult error) {
    return error == CUDA_ERROR_ECC_UNCORRECTABLE || error == CUDA_ERROR_ILLEGAL_ADDRESS ||
           error == CUDA_ERROR_LAUNCH_TIMEOUT || error == CUDA_ERROR_ASSERT ||
           (error >= CUDA_ERROR_HARDWARE_STACK_ERROR && error <= CUDA_ERROR_LAUNCH_FAILED) ||
           error == CUDA_ERROR_UNKNOWN;
}

CUresult raise_sticky(CUresult error) {
    if (!state.sticky)
        state.sticky = error;
    return state.sticky;
}

/* Defects: what CUDA permits or leaves undefined, and a correct program does not do. */

static char **defects;
static size_t defect_count;

void defect(const char *format, ...) {
    char *text = malloc(256);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, 256, format, arguments);
    va_end(arguments);
    defects = realloc(defects, (defect_count + 1) * sizeof *defects);
    defects[defect_count++] = text;
}

void clear_defects(void) {
    while (defect_count)
        free(defects[--defect_count]);
}

/* Writes a defect; false if there are fewer. */
bool software_defect(size_t index, char *text, size_t size) {
    lock_state();
    bool found = index < defect_count;
    if (found)
        snprintf(text, size, "%s", defects[index]);
    unlock_state();
    return found;
}
