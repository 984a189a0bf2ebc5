/* Graphs: nodes in the order of their submission, which is one that their edges permit. */
#include "driver.h"

#include <stdlib.h>

void add_node(Graph *graph, const Operation *node) {
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 16;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
    }
    graph->nodes[graph->count++] = *node;
}

void release_graph(Graph *graph) {
    if (--graph->uses)
        return;
    free(graph->nodes);
    graph->nodes = NULL;
    graph->count = 0;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    ENTER(CALL)
    Graph *graph = object_of(GRAPHS, handle);
    if (!graph || !graph->live)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (nodes)
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    *count = graph->count;
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle) {
    ENTER(INITIALIZED | TEARDOWN)
    Graph *graph = object_of(GRAPHS, handle);
    if (!graph || !graph->live)
        return leave(CUDA_ERROR_INVALID_VALUE);
    graph->live = false;
    release_graph(graph);
    return leave(state.sticky);
}

/* An executable graph is a copy: the graph that it was made from may be destroyed. */
static CUresult instantiate(CUgraphExec *handle, CUgraph graph_handle) {
    Graph *graph = object_of(GRAPHS, graph_handle);
    if (!graph || !graph->live)
        return CUDA_ERROR_INVALID_VALUE;
    Graph *executable = calloc(1, sizeof *executable);
    executable->live = true;
    executable->uses = 1;
    for (size_t i = 0; i < graph->count; i++)
        add_node(executable, &graph->nodes[i]);
    *handle = new_object(EXECUTABLES, executable);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph, unsigned long long flags) {
    (void)flags;
    ENTER(CALL)
    return leave(instantiate(handle, graph));
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *handle, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    ENTER(CALL)
    params->hErrNode_out = NULL;
    params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return leave(instantiate(handle, graph));
}

/* The symbols of CUDA 10 and 11, which cuda.h names only to the library itself. */
#undef cuGraphInstantiate
CUresult cuGraphInstantiate(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);

CUresult cuGraphInstantiate_v2(CUgraphExec *handle, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    ENTER(CALL)
    if (error)
        *error = NULL;
    if (log && size)
        *log = 0;
    return leave(instantiate(handle, graph));
}

CUresult cuGraphInstantiate(CUgraphExec *handle, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    return cuGraphInstantiate_v2(handle, graph, error, log, size);
}

static CUresult launch(CUgraphExec handle, CUstream stream_handle) {
    CUresult result = CUDA_SUCCESS;
    Graph *executable = object_of(EXECUTABLES, handle);
    Stream *stream = stream_of(stream_handle, &result);
    if (result)
        return result;
    if (!executable || !executable->live)
        return CUDA_ERROR_INVALID_VALUE;
    executable->uses++;
    return submit(stream, (Operation){.kind = LAUNCH, .graph = executable});
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    ENTER(CALL)
    return leave(launch(handle, stream));
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec handle, CUstream stream) {
    (void)stream;
    ENTER(CALL)
    Graph *executable = object_of(EXECUTABLES, handle);
    return leave(executable && executable->live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle) {
    ENTER(INITIALIZED | TEARDOWN)
    Graph *executable = object_of(EXECUTABLES, handle);
    if (!executable || !executable->live)
        return leave(CUDA_ERROR_INVALID_VALUE);
    executable->live = false;
    release_graph(executable); /* a launch that waits keeps the nodes */
    return leave(state.sticky);
}
