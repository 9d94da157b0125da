// SPDX-License-Identifier: Apache-2.0
// LaunchList: kernel launches with packed parameters, started by one call. See launch_list.py.
//
//     packed   [parameter | parameter | ... ]   of all launches, with gaps
//     gaps     address of a tensor (8 bytes), tensor map (128 bytes, with an address in it), size of the call
//
// A run fills the gaps of a copy on its stack, releases Python's lock, and launches.

#include "cuda.h"
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 16384, MOST_PARAMETERS = 1024, MOST_VALUES = 256 };

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
} Driver;

typedef struct {
  PyObject_HEAD
  Driver driver;
  Launch *launches;
  unsigned *positions;  // of each parameter in `packed`
  Gap *pointers, *maps, *sizes;
  unsigned char *packed;
  Py_ssize_t launch_count, position_count, pointer_count, map_count, size_count, bytes;
  CUcontext context;  // to which the functions belong
} LaunchList;

// Read the addresses of cuLaunchKernelEx, cuTensorMapReplaceAddress and cuCtxGetCurrent.
static int read_driver(PyObject *given, Driver *driver) {
  unsigned long long launch, replace, context;
  if (!PyArg_ParseTuple(given, "KKK", &launch, &replace, &context))
    return 0;
  driver->launch_kernel = (void *)(uintptr_t)launch;
  driver->replace_address = (void *)(uintptr_t)replace;
  driver->current_context = (void *)(uintptr_t)context;
  return 1;
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
    if (read && (found[i].number >= MOST_VALUES || wide < 1 || wide > 128 || found[i].at + wide > bytes)) {
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

static void list_free(PyObject *self) {
  LaunchList *list = (LaunchList *)self;
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
  if (bytes > MOST_BYTES || list->position_count > MOST_PARAMETERS) {
    PyErr_SetString(PyExc_ValueError, "the launches have too many parameters for one list");
    return 0;
  }
  list->launches = zeros(list->launch_count, sizeof(Launch));
  list->positions = zeros(list->position_count, sizeof(unsigned));
  list->packed = malloc(bytes ? bytes : 1);
  if (!list->launches || !list->positions || !list->packed)
    return PyErr_NoMemory(), 0;
  memcpy(list->packed, packed, bytes);
  Py_ssize_t parameters = 0;
  for (Py_ssize_t i = 0; i < list->launch_count; i++) {
    PyObject *each = PySequence_GetItem(launches, i);
    int read = each && read_launch(each, &list->launches[i]);
    Py_XDECREF(each);
    if (!read)
      return 0;
    parameters += list->launches[i].parameters;
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
  if (count > MOST_VALUES) {
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

static CUresult launch_all(const LaunchList *list, unsigned char *packed, CUstream stream) {
  void *parameters[MOST_PARAMETERS];
  for (Py_ssize_t i = 0; i < list->position_count; i++)
    parameters[i] = packed + list->positions[i];
  void **own = parameters;
  for (Py_ssize_t i = 0; i < list->launch_count; i++) {
    const Launch *launch = &list->launches[i];
    CUlaunchConfig config = launch->config;
    config.hStream = stream;
    if (config.gridDimX && config.gridDimY && config.gridDimZ) {
      CUresult result = list->driver.launch_kernel(&config, launch->function, own, NULL);
      if (result != CUDA_SUCCESS)
        return result;
    }
    own += launch->parameters;
  }
  return CUDA_SUCCESS;
}

static PyObject *list_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  LaunchList *list = (LaunchList *)self;
  unsigned long long stream, addresses[MOST_VALUES], sizes[MOST_VALUES];
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
  _Alignas(128) unsigned char packed[MOST_BYTES];
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

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dynaxx_launch_list", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_dynaxx_launch_list(void) {
  PyObject *made = PyType_Ready(&list_type) < 0 ? NULL : PyModule_Create(&module);
  if (made)
    PyModule_AddObjectRef(made, "LaunchList", (PyObject *)&list_type);
  return made;
}
