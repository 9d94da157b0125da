// SPDX-License-Identifier: Apache-2.0
// Fuzz the operator for ONNX Runtime: attributes, shapes and values of any kind, through a stand-in for the runtime.
//
// `operator CASES SEED`. A case passes if every call returns, with or without a status; the sanitizers end the program
// at any access outside of the tensors, which have exactly their sizes. Half of the plans are right before one of their
// numbers is changed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "ort_api.h"

namespace ort {

struct Status {
  std::string message;
};

struct Shape {
  std::vector<int64_t> sizes;
};

struct Value {
  std::vector<int64_t> sizes;
  std::vector<char> bytes;
};

struct KernelInfo {
  std::map<std::string, std::vector<int64_t>> integers;
  std::map<std::string, float> reals;
};

struct KernelContext {
  std::vector<const Value*> inputs;
  Value output;
};

struct Domain {
  const CustomOp* op;
};

struct Options {
  Domain* domain;
};

namespace {

Status* missing() { return new Status{"missing"}; }

template <class Function>
const void* place_of(Function* function) {
  return reinterpret_cast<const void*>(function);
}

Api stand_in() {
  Api api{};
  auto& at = api.functions;
  at[0] = place_of(+[](ErrorCode, const char* message) { return new Status{message}; });
  at[26] = place_of(+[](const char*, Domain** out) -> Status* { return *out = new Domain{}, nullptr; });
  at[27] = place_of(+[](Domain* domain, const CustomOp* op) -> Status* { return domain->op = op, nullptr; });
  at[28] = place_of(+[](Options* options, Domain* domain) -> Status* { return options->domain = domain, nullptr; });
  at[51] = place_of(+[](Value* value, void** out) -> Status* { return *out = value->bytes.data(), nullptr; });
  at[61] = place_of(+[](const Shape* shape, size_t* out) -> Status* { return *out = shape->sizes.size(), nullptr; });
  at[62] = place_of(+[](const Shape* shape, int64_t* out, size_t rank) -> Status* {
    return std::copy_n(shape->sizes.begin(), rank, out), nullptr;
  });
  at[65] = place_of(+[](const Value* value, Shape** out) -> Status* { return *out = new Shape{value->sizes}, nullptr; });
  at[85] = place_of(+[](const KernelInfo* info, const char* name, float* out) -> Status* {
    const auto found = info->reals.find(name);
    return found == info->reals.end() ? missing() : (*out = found->second, nullptr);
  });
  at[86] = place_of(+[](const KernelInfo* info, const char* name, int64_t* out) -> Status* {
    const auto found = info->integers.find(name);
    return found == info->integers.end() ? missing() : (*out = found->second[0], nullptr);
  });
  at[87] = place_of(+[](const KernelInfo*, const char*, char*, size_t*) -> Status* { return missing(); });
  at[90] = place_of(+[](const KernelContext* context, size_t index, const Value** out) -> Status* {
    return index < context->inputs.size() ? (*out = context->inputs[index], nullptr) : missing();
  });
  at[91] = place_of(+[](KernelContext* context, size_t, const int64_t* sizes, size_t rank, Value** out) -> Status* {
    int64_t count = sizeof(float);
    for (size_t i = 0; i < rank; i++) count *= sizes[i];
    context->output = {{sizes, sizes + rank}, std::vector<char>(count)};
    return *out = &context->output, nullptr;
  });
  at[93] = place_of(+[](Status* status) { delete status; });
  at[99] = place_of(+[](Shape* shape) { delete shape; });
  at[162] = place_of(+[](const KernelInfo*, const char*, float*, size_t*) -> Status* { return missing(); });
  at[163] = place_of(+[](const KernelInfo* info, const char* name, int64_t* out, size_t* count) -> Status* {
    const auto found = info->integers.find(name);
    if (found == info->integers.end()) return missing();
    if (!out || *count < found->second.size()) return *count = found->second.size(), out ? missing() : nullptr;
    return std::copy(found->second.begin(), found->second.end(), out), nullptr;
  });
  at[274] = place_of(+[](const KernelContext*, void (*run)(void*, size_t), size_t total, size_t, void* data) -> Status* {
    for (size_t i = 0; i < total; i++) run(data, i);
    return nullptr;
  });
  return api;
}

const Api API = stand_in();
const ApiBase BASE = {[](uint32_t) { return &API; }, [] { return "1.20"; }};

}  // namespace
}  // namespace ort

extern "C" ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base);

namespace {

std::mt19937_64 random_bits;

int64_t draw(int64_t low, int64_t high) { return low + int64_t(random_bits() % uint64_t(high - low + 1)); }
bool chance(int64_t one_in) { return draw(1, one_in) == 1; }

int64_t extreme() {
  static const int64_t numbers[] = {INT64_MIN, -(int64_t(1) << 62), INT32_MIN, -1, 0, 1, 2, 7, INT32_MAX, int64_t(1) << 31,
                                    int64_t(1) << 40, int64_t(1) << 62, INT64_MAX};
  return numbers[draw(0, 12)];
}

int64_t bits(double value) {
  int64_t made;
  std::memcpy(&made, &value, sizeof made);
  return made;
}

double real() {
  static const double reals[] = {0, 0.3, 1, 2, -1, 1e30, 1e300, INFINITY, -INFINITY, NAN};
  return reals[draw(0, 9)];
}

void append(std::vector<int64_t>& to, const std::vector<int64_t>& list) {
  to.push_back(int64_t(list.size()));
  to.insert(to.end(), list.begin(), list.end());
}

std::vector<int64_t> program() {
  static const std::vector<std::vector<int64_t>> programs = {
      {0, 0, 40}, {0, 0, 9, 1, 3, 8, 2}, {1, 5}, {2, 1, 0, 4}, {3, 1, -40, int64_t(1) << 40}, {5, 2}, {6, 2, 12345},
      {4, 3, 0, 50, 100}, {0, 0, 30, 2, 1, 0, 4, 7, 2}, {0, -20, 20}};
  return programs[draw(0, 9)];
}

std::vector<int64_t> plan_of(int64_t heads, bool causal) {
  static const int64_t sizes[] = {16, 32, 64, 128};
  std::vector<std::vector<int64_t>> groups(draw(1, std::min<int64_t>(heads, 3)));
  for (int64_t head = 0; head < heads; head++) groups[draw(0, int64_t(groups.size()) - 1)].push_back(head);
  std::vector<int64_t> plan = {sizes[draw(0, 3)], sizes[draw(0, 3)], 0};
  for (const auto& group : groups) {
    if (group.empty()) continue;
    plan[2]++;
    append(plan, group);
    const bool chooses = causal && chance(2);
    append(plan, chooses && chance(3) ? std::vector<int64_t>() : program());
    plan.push_back(chooses);
    if (!chooses) continue;
    const bool shares = chance(2);
    std::vector<int64_t> budgets(chance(2) ? 1 : group.size());
    for (int64_t& budget : budgets) budget = bits(shares ? draw(0, 10) / 10. : double(draw(0, 9)));
    for (const int64_t number : {draw(0, 2), bits(0.75), int64_t(shares), draw(0, 1), draw(0, 9)}) plan.push_back(number);
    append(plan, budgets);
  }
  if (chance(2)) plan[draw(0, int64_t(plan.size()) - 1)] = chance(3) ? bits(real()) : chance(2) ? extreme() : draw(-2, 12);
  if (chance(10)) plan.resize(draw(0, int64_t(plan.size())));
  return plan;
}

ort::Value tensor(std::vector<int64_t> sizes, bool is_mask) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  ort::Value made{std::move(sizes), std::vector<char>(is_mask ? count : count * sizeof(float))};
  if (is_mask) {
    const int64_t first = count ? draw(0, count / 2) : 0;
    for (int64_t i = 0; i < count; i++) made.bytes[i] = char(i < first ? 0 : chance(50) ? draw(0, 255) : 1);
  } else {
    float* data = reinterpret_cast<float*>(made.bytes.data());
    const bool odd = chance(3);
    for (int64_t i = 0; i < count; i++) data[i] = odd && chance(40) ? float(real()) : float(draw(-100, 100)) / 50;
  }
  return made;
}

// Run one operator on some inputs; return how many calls returned a result.
int run_case(const ort::CustomOp& op) {
  const int64_t kv_heads = draw(1, 3), heads = kv_heads * draw(1, 4);
  const bool causal = !chance(4), tokens_first = chance(2);
  ort::KernelInfo info;
  info.reals["scale"] = chance(5) ? float(real()) : 0.125f;
  info.integers["sparse_from"] = {chance(3) ? std::max<int64_t>(extreme(), -1) : 0};
  info.integers["always"] = {chance(3) ? draw(-1, 2) : 0};
  info.integers["causal"] = {causal};
  info.integers["tokens_first"] = {tokens_first};
  if (!chance(10)) info.integers["plan"] = plan_of(heads, causal);
  if (chance(30)) info.integers.erase(info.integers.begin());
  void* kernel = nullptr;
  if (ort::Status* status = op.create_v2(&op, &ort::API, &info, &kernel)) return delete status, 0;
  int good = 0;
  for (int call = 0; call < 2; call++) {
    const int64_t batch = draw(1, 2), longest = chance(4) ? 400 : 90, seqlen_k = draw(1, longest);
    const int64_t seqlen_q = chance(4) ? 1 : chance(2) ? seqlen_k : draw(1, seqlen_k), dim = draw(1, 40);
    std::vector<std::vector<int64_t>> shapes = {
        {batch, heads, seqlen_q, dim}, {batch, kv_heads, seqlen_k, dim}, {batch, kv_heads, seqlen_k, draw(1, 40)}};
    for (auto& shape : shapes)
      if (tokens_first) std::swap(shape[1], shape[2]);
    if (chance(3)) shapes.push_back({batch, seqlen_k});
    if (chance(6)) {
      auto& shape = shapes[draw(0, int64_t(shapes.size()) - 1)];
      if (chance(3))
        shape.push_back(1);
      else
        shape[draw(0, int64_t(shape.size()) - 1)] = draw(0, 5);
    }
    std::vector<ort::Value> values;
    for (size_t i = 0; i < shapes.size(); i++) values.push_back(tensor(shapes[i], i == 3));
    ort::KernelContext context;
    for (const ort::Value& value : values) context.inputs.push_back(&value);
    if (ort::Status* status = op.compute_v2(kernel, &context))
      delete status;
    else
      good++;
  }
  op.destroy(kernel);
  return good;
}

}  // namespace

int main(int count, char** words) {
  const int64_t cases = count > 1 ? std::atoll(words[1]) : 1000, seed = count > 2 ? std::atoll(words[2]) : 0;
  ort::Options options{};
  if (RegisterCustomOps(&options, &ort::BASE)) return 1;
  int64_t good = 0;
  for (int64_t at = 0; at < cases; at++) {
    random_bits.seed(uint64_t(seed * 1000003 + at));
    good += run_case(*options.domain->op);
  }
  std::printf("%lld cases of the operator: every call returned, %lld with a result\n", (long long)cases, (long long)good);
  return good == 0;
}
