/* Types and functions that the files of the software CUDA driver share. README.md lists what is modelled. */
#ifndef DRIVER_H
#define DRIVER_H

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A program may poll: every third query of a stream or an event lets the device proceed. */
#define QUERIES_UNTIL_PROGRESS 3

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Conditions that enter() checks, in this order. */
enum {
    ANYTIME = 0,       /* works before cuInit and after a sticky error */
    INITIALIZED = 1,   /* 3 before cuInit */
    CONTEXT = 2,       /* 201 without a current context, 709 if it is destroyed */
    HEALTHY = 4,       /* returns the sticky error */
    TEARDOWN = 8,      /* releases its object although it returns the sticky error */
    UNSAFE = 16,       /* 900 while a stream captures in global mode; the capture becomes invalid */
    WAITS = 32,        /* 800 inside a kernel */
    USES_LEGACY = 64   /* 906 while a blocking stream of the context captures */
};
#define CALL (INITIALIZED | CONTEXT | HEALTHY)

/* Opens a function of the API. The lock is held until leave(). */
#define ENTER(conditions)                                                                                              \
    CUresult result = enter(__func__, conditions);                                                                     \
    if (result)                                                                                                        \
        return result;

typedef enum { CONTEXTS, STREAMS, EVENTS, GRAPHS, EXECUTABLES, HANDLE_KINDS } HandleKind;
typedef enum { DEVICE_MEMORY, PINNED_MEMORY, REGION_KINDS } RegionKind;

typedef struct Context Context;
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Capture Capture;
typedef struct Graph Graph;
typedef struct Operation Operation;

/* A kernel of the software device: returns 0, or the error that the device raises. */
typedef CUresult (*Kernel)(void *userdata);

struct Context {
    bool live, primary;
    unsigned uses;
    Stream *legacy;
};

/* One recording of an event. It keeps its place in its stream when the event is recorded again. */
typedef struct {
    unsigned uses;
    Stream *stream;
    uint64_t sequence;
    Capture *capture; /* NULL unless recorded in a capturing stream */
    uint64_t capture_number;
    unsigned node; /* nodes of the stream in the capture so far */
    bool done;
    double time_ms;
} Record;

struct Stream {
    bool live, legacy, blocking;
    Context *context;
    Operation *first, *last;
    bool running;
    unsigned queries;
    Capture *capture;
    uint64_t capture_number;
    unsigned nodes, joined; /* of the capture: nodes in this stream, and those that another stream waits for */
};

struct Event {
    bool live;
    unsigned flags;
    unsigned queries;
    Context *context;
    Record *record;
};

typedef enum { COPY, FILL, KERNEL, RECORD, WAIT, LAUNCH, NOTHING } OperationKind;

typedef struct {
    enum { ON_DEVICE, IN_PINNED_MEMORY, IN_PAGEABLE_MEMORY } kind;
    uint64_t address;
} Place;

/* Parts of a copy, `width` bytes each: `height` of them in each of `depth` slices, with their distances in bytes. */
typedef struct {
    size_t width, height, depth;
    size_t destination_pitch, destination_slice, source_pitch, source_slice;
} Parts;

/* What a stream holds until somebody synchronises it, and a node of a graph. */
struct Operation {
    OperationKind kind;
    uint64_t sequence;
    Operation *next;
    Place destination, source;
    size_t size;
    Parts parts;       /* COPY: all of `size` unless its height is set */
    void *staged;      /* pageable memory, copied at the call */
    unsigned char value; /* FILL */
    Kernel kernel;
    void *userdata;
    Record *record;
    Graph *graph;
};

struct Graph {
    bool live;
    unsigned uses;
    Operation *nodes;
    size_t count, room;
};

/* A capture from cuStreamBeginCapture to cuStreamEndCapture. */
struct Capture {
    bool invalid;
    uint64_t number;
    CUstreamCaptureMode mode;
    pthread_t thread;
    Stream *origin;
    Graph *graph;
};

typedef struct Region {
    RegionKind kind;
    uint64_t address; /* of the device */
    unsigned char *host;
    size_t size;
    unsigned flags;
    Context *context;
    struct Region *next;
} Region;

typedef struct {
    bool initialized;
    bool forked; /* from a process that had called cuInit */
    CUresult sticky; /* of the process: CUDA requires a new one */
    int devices;
    size_t capacity_bytes, used_bytes;
    Region *regions;
    Context *primary;
    unsigned primary_uses;
    unsigned generation; /* counts software_reset */
    uint64_t sequence, captures;
    unsigned executing;
} State;

extern State state;

/* state.c */
CUresult enter(const char *function, unsigned conditions); /* takes the lock, releases it if it returns an error */
CUresult leave(CUresult result);                           /* releases the lock */
void lock_state(void);
void unlock_state(void);
void *new_object(HandleKind kind, void *object); /* returns its handle */
void *handle_of(HandleKind kind, const void *object);
void *object_of(HandleKind kind, const void *handle); /* NULL for what is no handle */
size_t handles(HandleKind kind);                      /* of live and of dead objects */
void *object_at(HandleKind kind, size_t index);

/* faults.c */
void count_call(const char *function);
CUresult fail_now(const char *function);
CUresult raise_sticky(CUresult error);
bool is_sticky(CUresult error);
void defect(const char *format, ...) __attribute__((format(printf, 1, 2)));
void read_environment(void);
void clear_injections(void);
void clear_defects(void);

/* context.c */
Context *current_context(void);
CUresult check_context(void);
void destroy_context(Context *context);

/* memory.c */
Region *region_of_device(uint64_t address, size_t size);
Region *region_of_host(const void *host, size_t size);
void free_region(Region *region);
void free_graveyard(void);

/* operations.c */
extern _Thread_local bool in_kernel;
Stream *stream_of(CUstream handle, CUresult *result);
CUresult submit(Stream *stream, Operation operation);
CUresult finish(Stream *stream, uint64_t sequence);
CUresult finish_context(Context *context);
void try_finish(Stream *stream, uint64_t sequence);
bool pending(const Stream *stream);
void discard(Stream *stream);
size_t pending_operations(void);
Record *use_record(Record *record);
void release_record(Record *record);

/* captures.c */
bool forbids_unsafe_calls(void); /* of this thread; the captures that forbid them become invalid */
void invalidate_captures(const Context *context);
void drop_capture(Capture *capture);
bool captures_in(const Context *context);
bool blocking_capture(const Context *context);
CUresult capture_operation(Stream *stream, const Operation *operation);
CUresult capture_wait(Stream *stream, const Record *record);

/* graphs.c */
void add_node(Graph *graph, const Operation *node);
void release_graph(Graph *graph);

#endif
