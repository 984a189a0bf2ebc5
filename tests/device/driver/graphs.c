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
CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    (void)flags;
    ENTER(CALL)
    Graph *graph = object_of(GRAPHS, graph_handle);
    if (!graph || !graph->live)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Graph *executable = calloc(1, sizeof *executable);
    executable->live = true;
    executable->uses = 1;
    for (size_t i = 0; i < graph->count; i++)
        add_node(executable, &graph->nodes[i]);
    *handle = new_object(EXECUTABLES, executable);
    return leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    ENTER(CALL)
    Graph *executable = object_of(EXECUTABLES, handle);
    Stream *stream = stream_of(stream_handle, &result);
    if (!result && !(executable && executable->live))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result)
        return leave(result);
    executable->uses++;
    return leave(submit(stream, (Operation){.kind = LAUNCH, .graph = executable}));
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
