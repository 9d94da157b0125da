// SPDX-License-Identifier: Apache-2.0
// LaunchList: kernel launches with packed parameters, started by one call. See launch_list.py.
//
//     packed   [parameter | parameter | ... ]   of all launches, with gaps
//     gaps     address of a tensor (8 bytes), tensor map (128 bytes, with an address in it), size of the call
//
// A run fills the gaps of a copy on its stack, releases Python's lock, and launches: kernel by kernel at first, and as a
// CUDA graph from the third run on. The graph is a chain of the same kernels. Each run sets the parameters of its nodes
// and launches it, which takes a quarter of the time. A graph serves one stream, because its launches never overlap, and
// one thread at a time. All other runs launch kernel by kernel, as do runs that the caller captures into another graph.

#include "cuda.h"
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_BYTES = 16384, MAX_PARAMETERS = 1024, MAX_VALUES = 256 };
enum { MIN_KERNELS = 3, RUNS_BEFORE_GRAPH = 2 };  // of a list that becomes a graph
enum { RUNS_BEFORE_MOVE = 16 };                      // in succession on other streams, before the graph follows

typedef struct {
  unsigned at;       // position in `packed`
  unsigned number;   // of a tensor or a size
  long long offset;  // bytes added to the tensor's address; bytes of the size
} Gap;

typedef struct {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  CUfunction function;
  unsigned parameters;
} Launch;

typedef struct {
  CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*replace_address)(CUtensorMap *, void *);
  CUresult (*current_context)(CUcontext *);
  // NULL without graphs:
  CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
  CUresult (*exchange_capture_mode)(CUstreamCaptureMode *);
  CUresult (*create)(CUgraph *, unsigned);
  CUresult (*add_kernel)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS *);
  CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
  CUresult (*set_parameters)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *);
  CUresult (*launch_graph)(CUgraphExec, CUstream);
  CUresult (*destroy_ready)(CUgraphExec);
  CUresult (*destroy)(CUgraph);
} Driver;

typedef struct {
  pthread_mutex_t busy;  // held while a run sets parameters and launches
  int allowed;           // whether the launches may become a graph
  unsigned runs;         // before the graph was made, or in succession on other streams
  CUstream stream;       // on which the graph is launched
  CUgraph graph;         // NULL until it is made
  CUgraphExec ready;
  CUgraphNode *nodes;  // of each launch
  pid_t process;       // that made the graph
} Graph;

typedef struct {
  PyObject_HEAD
  Driver driver;
  Graph graph;
  Launch *launches;
  unsigned *positions;  // of each parameter in `packed`
  Gap *pointers, *maps, *sizes;
  unsigned char *packed;
  Py_ssize_t launch_count, position_count, pointer_count, map_count, size_count, bytes;
  CUcontext context;  // to which the functions belong
} LaunchList;

static int uses_graphs = 1;  // see `use_graphs`

// Read the addresses of the driver's functions, in the order of `Driver`; those for graphs may be left out.
static int read_driver(PyObject *given, Driver *driver) {
  void **functions[] = {
      (void **)&driver->launch_kernel, (void **)&driver->replace_address, (void **)&driver->current_context,
      (void **)&driver->is_capturing,  (void **)&driver->exchange_capture_mode,
      (void **)&driver->create,        (void **)&driver->add_kernel,      (void **)&driver->instantiate,
      (void **)&driver->set_parameters, (void **)&driver->launch_graph,   (void **)&driver->destroy_ready,
      (void **)&driver->destroy,
  };
  Py_ssize_t most = sizeof(functions) / sizeof(functions[0]), count = PyTuple_GET_SIZE(given);
  if (count != 3 && count != most) {
    PyErr_SetString(PyExc_ValueError, "the driver's functions must be 3, or 12 with graphs");
    return 0;
  }
  for (Py_ssize_t i = 0; i < count; i++)
    *functions[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, i));
  return !PyErr_Occurred();
}

static void *zeros(Py_ssize_t count, size_t size) { return calloc(count ? count : 1, size); }

// Read a sequence of (position, number, offset) whose gaps are `width` bytes wide, or as wide as their offset says.
static Gap *read_gaps(PyObject *given, Py_ssize_t *count, Py_ssize_t bytes, Py_ssize_t width) {
  *count = PySequence_Size(given);
  if (*count < 0)
    return NULL;
  Gap *found = zeros(*count, sizeof(Gap));
  if (!found)
    return (Gap *)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < *count; i++) {
    PyObject *each = PySequence_GetItem(given, i);
    int read = each && PyArg_ParseTuple(each, "IIL", &found[i].at, &found[i].number, &found[i].offset);
    Py_XDECREF(each);
    Py_ssize_t wide = width ? width : (Py_ssize_t)found[i].offset;
    if (read && (found[i].number >= MAX_VALUES || wide < 1 || wide > 128 || found[i].at + wide > bytes)) {
      PyErr_SetString(PyExc_ValueError, "a gap must lie within the packed parameters");
      read = 0;
    }
    if (!read) {
      free(found);
      return NULL;
    }
  }
  return found;
}

static void add_attribute(Launch *launch, CUlaunchAttribute attribute) {
  launch->attributes[launch->config.numAttrs++] = attribute;
}

// Read (function, grid x, y, z, warps, ctas, shared memory, is cooperative, overlaps, number of parameters).
static int read_launch(PyObject *given, Launch *launch) {
  unsigned long long function;
  unsigned x, y, z, warps, ctas, shared;
  int cooperative, overlaps;
  if (!PyArg_ParseTuple(given, "KIIIIIIppI", &function, &x, &y, &z, &warps, &ctas, &shared, &cooperative, &overlaps,
                        &launch->parameters))
    return 0;
  launch->function = (CUfunction)(uintptr_t)function;
  CUlaunchConfig *config = &launch->config;
  config->gridDimX = x * ctas, config->gridDimY = y, config->gridDimZ = z;
  config->blockDimX = 32 * warps, config->blockDimY = 1, config->blockDimZ = 1;
  config->sharedMemBytes = shared;
  config->attrs = launch->attributes;
  if (overlaps) {
    CUlaunchAttribute overlap = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
    overlap.value.programmaticStreamSerializationAllowed = 1;
    add_attribute(launch, overlap);
  }
  if (cooperative) {
    CUlaunchAttribute together = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE};
    together.value.cooperative = 1;
    add_attribute(launch, together);
  }
  if (ctas > 1) {
    CUlaunchAttribute cluster = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
    cluster.value.clusterDim.x = ctas, cluster.value.clusterDim.y = 1, cluster.value.clusterDim.z = 1;
    add_attribute(launch, cluster);
    CUlaunchAttribute spread = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE};
    spread.value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    add_attribute(launch, spread);
  }
  return 1;
}

// Destroy the graph, and launch kernel by kernel from now on.
static void end_graph(LaunchList *list) {
  Graph *graph = &list->graph;
  int own = graph->process == getpid();  // a forked process has no graph
  if (graph->ready && own)
    list->driver.destroy_ready(graph->ready);
  if (graph->graph && own)
    list->driver.destroy(graph->graph);
  graph->ready = NULL, graph->graph = NULL, graph->allowed = 0;
}

static void list_free(PyObject *self) {
  LaunchList *list = (LaunchList *)self;
  end_graph(list);
  free(list->graph.nodes);
  free(list->launches), free(list->positions), free(list->packed);
  free(list->pointers), free(list->maps), free(list->sizes);
  Py_TYPE(self)->tp_free(self);
}

static int read_list(LaunchList *list, PyObject *launches, PyObject *positions, const char *packed, Py_ssize_t bytes,
                     PyObject *pointers, PyObject *maps, PyObject *sizes) {
  list->bytes = bytes;
  list->launch_count = PySequence_Size(launches), list->position_count = PySequence_Size(positions);
  if (list->launch_count < 0 || list->position_count < 0)
    return 0;
  if (bytes > MAX_BYTES || list->position_count > MAX_PARAMETERS) {
    PyErr_SetString(PyExc_ValueError, "the launches have too many parameters for one list");
    return 0;
  }
  list->launches = zeros(list->launch_count, sizeof(Launch));
  list->positions = zeros(list->position_count, sizeof(unsigned));
  list->packed = malloc(bytes ? bytes : 1);
  list->graph.nodes = zeros(list->launch_count, sizeof(CUgraphNode));
  if (!list->launches || !list->positions || !list->packed || !list->graph.nodes)
    return PyErr_NoMemory(), 0;
  list->graph.allowed = list->driver.create && list->launch_count >= MIN_KERNELS;
  memcpy(list->packed, packed, bytes);
  Py_ssize_t parameters = 0;
  for (Py_ssize_t i = 0; i < list->launch_count; i++) {
    PyObject *each = PySequence_GetItem(launches, i);
    int read = each && read_launch(each, &list->launches[i]);
    Py_XDECREF(each);
    if (!read)
      return 0;
    parameters += list->launches[i].parameters;
    const CUlaunchConfig *config = &list->launches[i].config;
    list->graph.allowed &= !config->numAttrs && config->gridDimX && config->gridDimY && config->gridDimZ;
  }
  for (Py_ssize_t i = 0; i < list->position_count; i++) {
    PyObject *each = PySequence_GetItem(positions, i);
    list->positions[i] = each ? (unsigned)PyLong_AsUnsignedLong(each) : 0;
    Py_XDECREF(each);
    if (PyErr_Occurred())
      return 0;
  }
  if (parameters != list->position_count) {
    PyErr_SetString(PyExc_ValueError, "the launches must have as many parameters as there are positions");
    return 0;
  }
  return (list->pointers = read_gaps(pointers, &list->pointer_count, bytes, 8)) &&
         (list->maps = read_gaps(maps, &list->map_count, bytes, sizeof(CUtensorMap))) &&
         (list->sizes = read_gaps(sizes, &list->size_count, bytes, 0));
}

static PyObject *list_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  PyObject *driver, *launches, *positions, *pointers, *maps, *sizes;
  const char *packed;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "O!OOy#OOO", &PyTuple_Type, &driver, &launches, &positions, &packed, &bytes, &pointers,
                        &maps, &sizes))
    return NULL;
  LaunchList *list = (LaunchList *)type->tp_alloc(type, 0);
  if (list)
    pthread_mutex_init(&list->graph.busy, NULL);
  if (list && !read_driver(driver, &list->driver))
    Py_CLEAR(list);
  if (list)
    list->driver.current_context(&list->context);
  if (list && !read_list(list, launches, positions, packed, bytes, pointers, maps, sizes))
    Py_CLEAR(list);
  return (PyObject *)list;
}

// Read a list of integers into `found`, and return their number, or -1.
static Py_ssize_t read_integers(PyObject *given, unsigned long long *found) {
  if (!PyList_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "addresses and sizes must be lists of integers");
    return -1;
  }
  Py_ssize_t count = PyList_GET_SIZE(given);
  if (count > MAX_VALUES) {
    PyErr_SetString(PyExc_ValueError, "a call has too many tensors or sizes");
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++)
    found[i] = PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(given, i));
  return PyErr_Occurred() ? -1 : count;
}

static int are_numbered(const Gap *gaps, Py_ssize_t count, Py_ssize_t values) {
  for (Py_ssize_t i = 0; i < count; i++)
    if (gaps[i].number >= values)
      return 0;
  return 1;
}

static CUresult launch_kernels(const LaunchList *list, void **parameters, CUstream stream) {
  for (Py_ssize_t i = 0; i < list->launch_count; i++) {
    const Launch *launch = &list->launches[i];
    CUlaunchConfig config = launch->config;
    config.hStream = stream;
    if (config.gridDimX && config.gridDimY && config.gridDimZ) {
      CUresult result = list->driver.launch_kernel(&config, launch->function, parameters, NULL);
      if (result != CUDA_SUCCESS)
        return result;
    }
    parameters += launch->parameters;
  }
  return CUDA_SUCCESS;
}

static CUDA_KERNEL_NODE_PARAMS node_parameters(const Launch *launch, void **parameters) {
  const CUlaunchConfig *config = &launch->config;
  return (CUDA_KERNEL_NODE_PARAMS){
      .func = launch->function,
      .gridDimX = config->gridDimX, .gridDimY = config->gridDimY, .gridDimZ = config->gridDimZ,
      .blockDimX = config->blockDimX, .blockDimY = config->blockDimY, .blockDimZ = config->blockDimZ,
      .sharedMemBytes = config->sharedMemBytes,
      .kernelParams = parameters,
  };
}

// Make the graph of the launches. Another thread may be capturing meanwhile.
static CUresult make_graph(LaunchList *list, void **parameters) {
  const Driver *driver = &list->driver;
  Graph *graph = &list->graph;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  graph->process = getpid();
  CUresult result = driver->exchange_capture_mode(&mode);
  if (result != CUDA_SUCCESS)
    return result;
  result = driver->create(&graph->graph, 0);
  for (Py_ssize_t i = 0; i < list->launch_count && result == CUDA_SUCCESS; i++) {
    CUDA_KERNEL_NODE_PARAMS node = node_parameters(&list->launches[i], parameters);
    result = driver->add_kernel(&graph->nodes[i], graph->graph, i ? &graph->nodes[i - 1] : NULL, i ? 1 : 0, &node);
    parameters += list->launches[i].parameters;
  }
  if (result == CUDA_SUCCESS)
    result = driver->instantiate(&graph->ready, graph->graph, 0);
  driver->exchange_capture_mode(&mode);
  return result;
}

// Set the parameters of the graph, which is made first if it is time; return 0 if the kernels must be launched.
static int set_graph(LaunchList *list, void **parameters, CUstream stream) {
  Graph *graph = &list->graph;
  CUstreamCaptureStatus status;
  if (list->driver.is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE)
    return 0;
  int other = !graph->ready || graph->stream != stream;
  if (other && graph->runs < (graph->ready ? RUNS_BEFORE_MOVE : RUNS_BEFORE_GRAPH)) {
    graph->runs++;
    return 0;
  }
  graph->runs = 0, graph->stream = stream;
  CUresult result = CUDA_SUCCESS;
  if (!graph->ready)
    result = make_graph(list, parameters);
  else
    for (Py_ssize_t i = 0; i < list->launch_count && result == CUDA_SUCCESS; i++) {
      CUDA_KERNEL_NODE_PARAMS node = node_parameters(&list->launches[i], parameters);
      result = list->driver.set_parameters(graph->ready, graph->nodes[i], &node);
      parameters += list->launches[i].parameters;
    }
  if (result != CUDA_SUCCESS)
    end_graph(list);
  return result == CUDA_SUCCESS;
}

static CUresult launch_all(LaunchList *list, unsigned char *packed, CUstream stream) {
  void *parameters[MAX_PARAMETERS];
  for (Py_ssize_t i = 0; i < list->position_count; i++)
    parameters[i] = packed + list->positions[i];
  Graph *graph = &list->graph;
  if (uses_graphs && graph->allowed && pthread_mutex_trylock(&graph->busy) == 0) {
    int ready = graph->allowed && set_graph(list, parameters, stream);
    CUresult result = ready ? list->driver.launch_graph(graph->ready, stream) : CUDA_SUCCESS;
    pthread_mutex_unlock(&graph->busy);
    if (ready)
      return result;
  }
  return launch_kernels(list, parameters, stream);
}

static PyObject *list_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  LaunchList *list = (LaunchList *)self;
  unsigned long long stream, addresses[MAX_VALUES], sizes[MAX_VALUES];
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "run(stream, addresses, sizes) takes three arguments");
    return NULL;
  }
  stream = PyLong_AsUnsignedLongLongMask(args[0]);
  Py_ssize_t tensors = read_integers(args[1], addresses), values = tensors < 0 ? -1 : read_integers(args[2], sizes);
  if (values < 0 || PyErr_Occurred())
    return NULL;
  if (!are_numbered(list->pointers, list->pointer_count, tensors) ||
      !are_numbered(list->maps, list->map_count, tensors) || !are_numbered(list->sizes, list->size_count, values)) {
    PyErr_SetString(PyExc_ValueError, "a run must have the tensors and sizes of the recorded call");
    return NULL;
  }
  CUcontext context = NULL;
  if (list->driver.current_context(&context) != CUDA_SUCCESS || context != list->context)
    Py_RETURN_FALSE;
  _Alignas(128) unsigned char packed[MAX_BYTES];
  CUresult result = CUDA_SUCCESS;
  Py_BEGIN_ALLOW_THREADS;
  memcpy(packed, list->packed, list->bytes);
  for (Py_ssize_t i = 0; i < list->pointer_count; i++) {
    const Gap *gap = &list->pointers[i];
    uint64_t address = addresses[gap->number] + gap->offset;
    memcpy(packed + gap->at, &address, 8);
  }
  for (Py_ssize_t i = 0; i < list->size_count; i++) {
    const Gap *gap = &list->sizes[i];
    memcpy(packed + gap->at, &sizes[gap->number], gap->offset);
  }
  for (Py_ssize_t i = 0; i < list->map_count && result == CUDA_SUCCESS; i++) {
    const Gap *gap = &list->maps[i];
    uint64_t address = addresses[gap->number] + gap->offset;
    result = list->driver.replace_address((CUtensorMap *)(packed + gap->at), (void *)(uintptr_t)address);
  }
  if (result == CUDA_SUCCESS)
    result = launch_all(list, packed, (CUstream)(uintptr_t)stream);
  Py_END_ALLOW_THREADS;
  if (result != CUDA_SUCCESS)
    return PyErr_Format(PyExc_RuntimeError, "CUDA error %d in a list of launches", (int)result);
  Py_RETURN_TRUE;
}

static PyMethodDef list_methods[] = {
    {"run", (PyCFunction)(void (*)(void))list_run, METH_FASTCALL, "Launch: run(stream, addresses, sizes); False in another context."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject list_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynaxx_launch_list.LaunchList",
    .tp_basicsize = sizeof(LaunchList),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "LaunchList(driver, launches, positions, packed, pointers, maps, sizes)",
    .tp_new = list_new,
    .tp_dealloc = list_free,
    .tp_methods = list_methods,
};

static PyObject *use_graphs(PyObject *self, PyObject *given) {
  int wanted = PyObject_IsTrue(given);
  if (wanted < 0)
    return NULL;
  uses_graphs = wanted;
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"use_graphs", use_graphs, METH_O, "Let lists launch as graphs, or kernel by kernel: use_graphs(whether)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dynaxx_launch_list", NULL, -1, module_methods};

PyMODINIT_FUNC PyInit_dynaxx_launch_list(void) {
  PyObject *made = PyType_Ready(&list_type) < 0 ? NULL : PyModule_Create(&module);
  if (made)
    PyModule_AddObjectRef(made, "LaunchList", (PyObject *)&list_type);
  return made;
}
