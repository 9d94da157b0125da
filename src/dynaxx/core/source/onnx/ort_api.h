// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's C API that the operator needs. No package that pip knows ships its header.
//
// `OrtApi` is a table of functions that only grows: a function's place never changes, so the places below hold for every
// runtime from 1.17 on. Which one is there is asked before anything else is called.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t VERSION = 17;  // of the API: the oldest with ParallelFor

struct Status;
struct KernelInfo;
struct KernelContext;
struct Value;
struct Shape;
struct Domain;
struct Options;
struct CustomOp;

enum ErrorCode : int { FAIL = 1, INVALID_ARGUMENT = 2, NOT_IMPLEMENTED = 9 };
enum Element : int { FLOAT = 1, BOOL = 9 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };

struct Api {
  const void* functions[275];

  template <class Function>
  Function* at(int place) const {
    return reinterpret_cast<Function*>(reinterpret_cast<size_t>(functions[place]));
  }

  Status* create_status(ErrorCode code, const char* message) const {
    return at<Status*(ErrorCode, const char*)>(0)(code, message);
  }
  Status* create_domain(const char* name, Domain** out) const {
    return at<Status*(const char*, Domain**)>(26)(name, out);
  }
  Status* add_op(Domain* domain, const CustomOp* op) const { return at<Status*(Domain*, const CustomOp*)>(27)(domain, op); }
  Status* add_domain(Options* options, Domain* domain) const { return at<Status*(Options*, Domain*)>(28)(options, domain); }
  Status* data_of(Value* value, void** out) const { return at<Status*(Value*, void**)>(51)(value, out); }
  Status* rank_of(const Shape* shape, size_t* out) const { return at<Status*(const Shape*, size_t*)>(61)(shape, out); }
  Status* sizes_of(const Shape* shape, int64_t* out, size_t rank) const {
    return at<Status*(const Shape*, int64_t*, size_t)>(62)(shape, out, rank);
  }
  Status* shape_of(const Value* value, Shape** out) const { return at<Status*(const Value*, Shape**)>(65)(value, out); }
  Status* attribute(const KernelInfo* info, const char* name, float* out) const {
    return at<Status*(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return at<Status*(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return at<Status*(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* sizes, size_t rank, Value** out) const {
    return at<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, sizes, rank, out);
  }
  void release(Status* status) const { at<void(Status*)>(93)(status); }
  void release(Shape* shape) const { at<void(Shape*)>(99)(shape); }
  Status* attribute(const KernelInfo* info, const char* name, char* out, size_t* count) const {
    return at<Status*(const KernelInfo*, const char*, char*, size_t*)>(87)(info, name, out, count);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* out, size_t* count) const {
    return at<Status*(const KernelInfo*, const char*, float*, size_t*)>(162)(info, name, out, count);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out, size_t* count) const {
    return at<Status*(const KernelInfo*, const char*, int64_t*, size_t*)>(163)(info, name, out, count);
  }
  Status* parallel_for(const KernelContext* context, void (*run)(void*, size_t), size_t total, void* data) const {
    return at<Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(274)(context, run, total, 0,
                                                                                                  data);
  }
};

struct ApiBase {
  const Api* (*get)(uint32_t version);  // null where the runtime is older
  const char* (*version)();
};

// As version 17 reads it: the runtime asks `version` before it reads what came later.
struct CustomOp {
  uint32_t version;
  void* (*create)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  Element (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  Element (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Characteristic (*input_characteristic)(const CustomOp*, size_t);
  Characteristic (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_least)(const CustomOp*);
  int (*variadic_input_alike)(const CustomOp*);
  int (*variadic_output_least)(const CustomOp*);
  int (*variadic_output_alike)(const CustomOp*);
  Status* (*create_v2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*first_version)(const CustomOp*);
  int (*last_version)(const CustomOp*);
};

}  // namespace ort
