// SPDX-License-Identifier: Apache-2.0
// Host time of a chain of kernels: as launches, and as a CUDA graph whose parameters are set before each launch.
// See launches.py.

#include "cuda.h"
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MAX_KERNELS = 32, MAX_PARAMETERS = 1024, MAX_BYTES = 32768, MAX_ROUNDS = 4096, IN_A_ROW = 100 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

#define GET(name, symbol)                                    \
  __typeof__(&name) f_##name = (void *)dlsym(lib, symbol);   \
  if (!f_##name)                                             \
  return PyErr_Format(PyExc_RuntimeError, "no %s", symbol)
#define OK(call)                                                                    \
  do {                                                                              \
    CUresult result_ = (call);                                                      \
    if (result_)                                                                    \
      return PyErr_Format(PyExc_RuntimeError, "%s: %d", #call, (int)result_);       \
  } while (0)

static _Alignas(128) unsigned char packed[2][MAX_BYTES];
static void *params[2][MAX_PARAMETERS];
static CUlaunchConfig config[MAX_KERNELS];
static CUlaunchAttribute attribute[MAX_KERNELS];
static CUDA_KERNEL_NODE_PARAMS kernel[2][MAX_KERNELS];
static double times[5][MAX_ROUNDS];

static int read_launches(PyObject *launches, CUstream stream) {
  unsigned first = 0;
  for (int i = 0; i < PyList_Size(launches); i++) {
    unsigned long long function;
    unsigned x, y, z, warps, ctas, shared, count;
    int cooperative, overlaps;
    if (!PyArg_ParseTuple(PyList_GetItem(launches, i), "KIIIIIIppI", &function, &x, &y, &z, &warps, &ctas, &shared,
                          &cooperative, &overlaps, &count))
      return 0;
    config[i] = (CUlaunchConfig){.gridDimX = x * ctas, .gridDimY = y, .gridDimZ = z, .blockDimX = 32 * warps,
                                 .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = shared, .hStream = stream,
                                 .attrs = &attribute[i], .numAttrs = overlaps ? 1 : 0};
    attribute[i].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute[i].value.programmaticStreamSerializationAllowed = 1;
    for (int copy = 0; copy < 2; copy++)
      kernel[copy][i] = (CUDA_KERNEL_NODE_PARAMS){
          .func = (CUfunction)(uintptr_t)function, .gridDimX = x * ctas, .gridDimY = y, .gridDimZ = z,
          .blockDimX = 32 * warps, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = shared,
          .kernelParams = params[copy] + first};
    first += count;
  }
  return 1;
}

// bench(stream, launches, positions, packed, rounds) -> (us to instantiate, five lists of us, us of three in a row)
static PyObject *bench(PyObject *self, PyObject *args) {
  unsigned long long handle;
  PyObject *launches, *positions;
  Py_buffer given;
  int rounds;
  if (!PyArg_ParseTuple(args, "KO!O!y*i", &handle, &PyList_Type, &launches, &PyList_Type, &positions, &given, &rounds))
    return NULL;
  CUstream stream = (CUstream)(uintptr_t)handle;
  int n = (int)PyList_Size(launches), p = (int)PyList_Size(positions);
  if (given.len > MAX_BYTES || n > MAX_KERNELS || p > MAX_PARAMETERS || rounds > MAX_ROUNDS)
    return PyErr_Format(PyExc_ValueError, "too many kernels, parameters or rounds");
  void *lib = dlopen("libcuda.so.1", RTLD_LAZY);
  GET(cuLaunchKernelEx, "cuLaunchKernelEx");
  GET(cuGraphCreate, "cuGraphCreate");
  GET(cuGraphAddKernelNode, "cuGraphAddKernelNode_v2");
  GET(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
  GET(cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2");
  GET(cuGraphLaunch, "cuGraphLaunch");
  GET(cuGraphUpload, "cuGraphUpload");
  GET(cuStreamSynchronize, "cuStreamSynchronize");
  for (int copy = 0; copy < 2; copy++) {
    memcpy(packed[copy], given.buf, given.len);
    for (int i = 0; i < p; i++)
      params[copy][i] = packed[copy] + PyLong_AsLong(PyList_GetItem(positions, i));
  }
  PyBuffer_Release(&given);
  if (!read_launches(launches, stream))
    return NULL;
  CUgraph graph;
  CUgraphNode node[MAX_KERNELS];
  CUgraphExec ready;
  OK(f_cuGraphCreate(&graph, 0));
  for (int i = 0; i < n; i++)
    OK(f_cuGraphAddKernelNode(&node[i], graph, i ? &node[i - 1] : NULL, i ? 1 : 0, &kernel[0][i]));
  double start = now();
  OK(f_cuGraphInstantiateWithFlags(&ready, graph, 0));
  double instantiate = now() - start;
  OK(f_cuGraphUpload(ready, stream));
  OK(f_cuGraphLaunch(ready, stream));
#define LAUNCH_ALL                 \
  for (int i = 0; i < n; i++)      \
  OK(f_cuLaunchKernelEx(&config[i], kernel[0][i].func, kernel[0][i].kernelParams, NULL))
#define SET_ALL                    \
  for (int i = 0; i < n; i++)      \
  OK(f_cuGraphExecKernelNodeSetParams(ready, node[i], &kernel[r & 1][i]))
#define TIMED(row, work)                     \
  OK(f_cuStreamSynchronize(stream));         \
  start = now();                             \
  work;                                      \
  times[row][r] = now() - start
  for (int r = 0; r < rounds; r++) {
    TIMED(0, LAUNCH_ALL);
    TIMED(1, OK(f_cuGraphLaunch(ready, stream)));
    TIMED(2, SET_ALL);
    start = now();
    OK(f_cuGraphLaunch(ready, stream));
    times[3][r] = now() - start;
    TIMED(4, OK(f_cuLaunchKernelEx(&config[0], kernel[0][0].func, kernel[0][0].kernelParams, NULL)));
  }
#define IN_ROW(us, work)                          \
  OK(f_cuStreamSynchronize(stream));              \
  start = now();                                  \
  for (int r = 0; r < IN_A_ROW; r++) { work; }    \
  double us = (now() - start) / IN_A_ROW
  IN_ROW(all, LAUNCH_ALL);
  IN_ROW(graphs, OK(f_cuGraphLaunch(ready, stream)));
  IN_ROW(set, SET_ALL; OK(f_cuGraphLaunch(ready, stream)));
  OK(f_cuStreamSynchronize(stream));
  PyObject *lists = PyList_New(0);
  for (int row = 0; row < 5; row++) {
    PyObject *list = PyList_New(0);
    for (int r = 0; r < rounds; r++)
      PyList_Append(list, PyFloat_FromDouble(times[row][r]));
    PyList_Append(lists, list);
  }
  return Py_BuildValue("dN(ddd)", instantiate, lists, all, graphs, set);
}

static PyMethodDef methods[] = {{"bench", bench, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launches", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launches(void) { return PyModule_Create(&module); }
