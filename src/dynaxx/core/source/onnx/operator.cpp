// SPDX-License-Identifier: Apache-2.0
// dynaxx::SparseAttention for ONNX Runtime: attention of one layer by its rules, on the core.
//
// Inputs q (batch, q_heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim), queries aligned to the
// last keys; output (batch, seqlen_q, q_heads, head_dim of v). All fp32. Attributes: `scale`; `plan`, the rules as
// `LayerRules::read` takes them; `sparse_from`, keys from which they hold, before that all keys are seen; `always`, 1 for
// a window of the model, which holds at every length and in decoding.
//
// For encoders: `causal` 0 shows the keys after a query too. `tokens_first` 1 takes q, k and v as (batch, seqlen, heads,
// head_dim), as linear layers write them. The optional input `mask` (batch, seqlen) bool names the tokens of each sequence,
// which must lie in one run; the rows of the others are zero.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "cache.h"
#include "launch.h"
#include "layer_rules.h"
#include "ort_api.h"
#include "vec.h"

extern "C" {
int dynaxx_cpu_forward(const dynaxx::ForwardArgs* args);
int dynaxx_cpu_decode(const dynaxx::DecodeArgs* args);
}

namespace {

using namespace dynaxx_onnx;

struct Work {
  void (*run)(void*);
  void* data;
};

// While it lives, the core's tasks of this thread run in the pool of the session that is computing.
class SessionThreads {
 public:
  SessionThreads(const ort::Api& api, const ort::KernelContext* context) {
    current_ = {&api, context};
    dynaxx::current_launch() = run;
  }
  ~SessionThreads() { dynaxx::current_launch() = before_; }
  SessionThreads(const SessionThreads&) = delete;
  SessionThreads& operator=(const SessionThreads&) = delete;

 private:
  struct Current {
    const ort::Api* api;
    const ort::KernelContext* context;
  };

  static void run(void (*run)(void*), void* data, int64_t threads) {
    Work work{run, data};
    const auto once = [](void* work, size_t) { static_cast<Work*>(work)->run(static_cast<Work*>(work)->data); };
    ort::Status* status = current_.api->parallel_for(current_.context, once, size_t(threads), &work);
    if (!status) return;
    current_.api->release(status);
    run(data);  // takes every task that is left
  }

  static thread_local Current current_;
  const dynaxx::Launch before_ = dynaxx::current_launch();
};

thread_local SessionThreads::Current SessionThreads::current_ = {};

// Every key: a band without ends; the first is cut by causality.
constexpr int64_t FAR = int64_t(1) << 62;

class Refused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Kernel {
 public:
  Kernel(const ort::Api& api, const ort::KernelInfo* info) : api_(api) {
    float scale = 0;
    if (!good(api.attribute(info, "scale", &scale)) || !std::isfinite(scale)) throw Refused("`scale` must be a finite number");
    scale_ = scale;
    sparse_from_ = integer(info, "sparse_from", INT64_MAX);
    always_ = integer(info, "always", 1);
    if (has(info, "causal")) causal_ = integer(info, "causal", 1);  // not in files of older versions
    if (has(info, "tokens_first")) tokens_first_ = integer(info, "tokens_first", 1);
    size_t count = 0;
    if (has(info, "plan") && (!good(api.attribute(info, "plan", static_cast<int64_t*>(nullptr), &count)) || !count))
      throw Refused("`plan` must be a list of integers");
    plan_.resize(count);
    if (count) check(api.attribute(info, "plan", plan_.data(), &count));
    any_heads_ = plan_.empty();
    if (any_heads_) plan_ = all_keys();
    rules_ = LayerRules::read(plan_);
    all_rules_ = LayerRules::read(all_keys());
    if (!causal_ && !rules_.is_static()) throw Refused("`plan` chooses blocks, which needs `causal` = 1");
  }

  void compute(ort::KernelContext* context) const {
    const Tensor q = input(context, 0), k = input(context, 1), v = input(context, 2);
    if (q.batch != k.batch || k.batch != v.batch || k.heads != v.heads || k.seqlen != v.seqlen || q.dim != k.dim ||
        !k.heads || q.heads % k.heads || q.seqlen > k.seqlen || !q.dim || !v.dim)
      throw Refused(
          "q (batch, q_heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim) must fit each other, "
          "with q_heads a multiple of kv_heads and no more queries than keys, got " +
          said(q) + ", " + said(k) + " and " + said(v));
    if (!any_heads_ && q.heads != rules_.q_heads)
      throw Refused("`plan` is for " + std::to_string(rules_.q_heads) + " q heads, got " + std::to_string(q.heads));
    const int64_t sizes[4] = {q.batch, q.seqlen, q.heads, v.dim};
    ort::Value* value = nullptr;
    check(api_.output(context, 0, sizes, 4, &value));
    void* out = nullptr;
    check(api_.data_of(value, &out));
    if (!q.batch || !q.seqlen || !q.heads) return;
    const std::vector<Run> runs = runs_of(context, q, k);
    const SessionThreads threads(api_, context);
    if (runs.empty())
      attend(q, k, v, static_cast<float*>(out));
    else
      attend_to_runs(runs, q, k, v, static_cast<float*>(out));
  }

 private:
  // The tokens of a sequence that are not padding.
  struct Run {
    int64_t first, end;
  };

  const std::vector<int64_t>& all_keys() const {
    static const std::vector<int64_t> before = {64, 64, 1, 1, 0, 3, BAND, 0, FAR, 0};
    static const std::vector<int64_t> around = {128, 128, 1, 1, 0, 3, BAND, -FAR, FAR, 0};
    return causal_ ? before : around;
  }

  bool good(ort::Status* status) const {
    if (status) api_.release(status);
    return !status;
  }

  void check(ort::Status* status) const {
    if (!good(status)) throw Refused("ONNX Runtime refused a call");
  }

  // Whether there is an attribute of that name, of any type: the runtime only says that it has none of a type.
  bool has(const ort::KernelInfo* info, const char* name) const {
    float real;
    int64_t number;
    size_t count = 0;
    const auto has_list = [&](auto none) { return good(api_.attribute(info, name, none, &count)); };
    return good(api_.attribute(info, name, &real)) || good(api_.attribute(info, name, &number)) ||
           has_list(static_cast<char*>(nullptr)) || has_list(static_cast<float*>(nullptr)) ||
           has_list(static_cast<int64_t*>(nullptr));
  }

  int64_t integer(const ort::KernelInfo* info, const char* name, int64_t most) const {
    int64_t value = -1;
    if (!good(api_.attribute(info, name, &value)) || value < 0 || value > most)
      throw Refused(std::string("`") + name + "` must be an integer from 0 to " + std::to_string(most));
    return value;
  }

  static std::string said(const Tensor& x) {
    return "(" + std::to_string(x.batch) + ", " + std::to_string(x.heads) + ", " + std::to_string(x.seqlen) + ", " +
           std::to_string(x.dim) + ")";
  }

  // Fill the sizes of a value of `rank` dimensions and return its data.
  const void* read(const ort::Value* value, size_t rank, const char* name, int64_t* sizes) const {
    ort::Shape* shape = nullptr;
    check(api_.shape_of(value, &shape));
    size_t found = 0;
    ort::Status* status = api_.rank_of(shape, &found);
    if (!status && found == rank) status = api_.sizes_of(shape, sizes, rank);
    api_.release(shape);
    check(status);
    if (found != rank)
      throw Refused(std::string(name) + " must have " + std::to_string(rank) + " dimensions, got " + std::to_string(found));
    void* data = nullptr;
    check(api_.data_of(const_cast<ort::Value*>(value), &data));
    return data;
  }

  Tensor input(const ort::KernelContext* context, size_t index) const {
    const ort::Value* value = nullptr;
    check(api_.input(context, index, &value));
    int64_t sizes[4] = {};
    const auto* data = static_cast<const float*>(read(value, 4, "q, k and v", sizes));
    if (tokens_first_) std::swap(sizes[1], sizes[2]);
    return {data, sizes[0], sizes[1], sizes[2], sizes[3], tokens_first_ != 0, sizes[2]};
  }

  // The run of each sequence's tokens; empty if there is no mask, or it hides nothing.
  std::vector<Run> runs_of(const ort::KernelContext* context, const Tensor& q, const Tensor& k) const {
    const ort::Value* value = nullptr;
    if (!good(api_.input(context, 3, &value)) || !value) return {};
    int64_t sizes[2] = {};
    const auto* mask = static_cast<const uint8_t*>(read(value, 2, "mask", sizes));  // bytes other than 0 and 1 are true
    if (sizes[0] != k.batch || sizes[1] != k.seqlen || q.seqlen != k.seqlen)
      throw Refused("mask must be (batch, seqlen) of q and k, got (" + std::to_string(sizes[0]) + ", " +
                    std::to_string(sizes[1]) + ") for " + said(q) + " and " + said(k));
    std::vector<Run> runs(k.batch);
    bool whole = true;
    for (int64_t b = 0; b < k.batch; b++, mask += k.seqlen) {
      const auto is_token = [](uint8_t shown) { return shown != 0; };
      const uint8_t* end = mask + k.seqlen;
      const uint8_t* first = std::find_if(mask, end, is_token);
      const uint8_t* last = std::find(first, end, 0);
      if (std::any_of(last, end, is_token))
        throw Refused("mask has holes in sequence " + std::to_string(b) +
                      ": hide tokens at the ends only, or export with form='portable'");
      runs[b] = {first - mask, last - mask};
      whole &= last - first == k.seqlen;
    }
    return whole ? std::vector<Run>() : runs;
  }

  void attend_to_runs(const std::vector<Run>& runs, const Tensor& q, const Tensor& k, const Tensor& v, float* out) const {
    const int64_t row = q.heads * v.dim, size = q.seqlen * row;
    for (int64_t b = 0; b < q.batch; b++, out += size) {
      const auto [first, end] = runs[b];
      std::memset(out, 0, first * row * sizeof(float));
      std::memset(out + end * row, 0, (q.seqlen - end) * row * sizeof(float));
      if (first < end) attend(q.part(b, first, end), k.part(b, first, end), v.part(b, first, end), out + first * row);
    }
  }

  void attend(const Tensor& q, const Tensor& k, const Tensor& v, float* out) const {
    const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
    std::vector<float> lse(q.batch * q.heads * q.seqlen);
    if (q.seqlen == 1 && !always_ && causal_) return decode(q, k, v, out, lse.data(), threads);
    const bool sparse = always_ || k.seqlen >= sparse_from_;
    const LayerRules& rules = sparse ? rules_ : all_rules_;
    const Grid grid{q.seqlen, k.seqlen, rules.q_block, rules.kv_block, causal_ != 0};
    const auto prepared = Prepared::of(rules, sparse ? plan_ : all_keys(), grid, q.heads);
    Plan plan{};
    plan.seqlen = q.seqlen;
    plan.block = rules.q_block;
    plan.visited_seqlen = k.seqlen;
    plan.visited_block = rules.kv_block;
    plan.layout_batch = 1;
    plan.layout_heads = prepared->layout_heads;
    plan.mask_words = prepared->words.data();
    plan.mask_runs = prepared->runs.data();
    Chosen chosen;
    if (prepared->layout_heads) {
      plan.indptr = prepared->indptr.data();
      plan.indices = prepared->indices.data();
      plan.masks = prepared->masks.data();
      plan.row_order = prepared->order.data();
    } else {
      chosen = choose(rules, *prepared, q, k, scale_, threads);
      plan.layout_batch = q.batch;
      plan.layout_heads = q.heads;
      plan.indptr = chosen.indptr.data();
      plan.indices = chosen.indices.data();
      plan.masks = chosen.masks.data();
      plan.row_order = chosen.order.data();
    }
    ForwardArgs args{};
    args.q = q.data;
    args.k = k.data;
    args.v = v.data;
    args.out = out;
    args.lse = lse.data();
    args.batch = q.batch;
    args.q_heads = q.heads;
    args.kv_heads = k.heads;
    args.head_dim = q.dim;
    args.head_dim_v = v.dim;
    args.q_strides = q.strides();
    args.k_strides = k.strides();
    args.v_strides = v.strides();
    args.plan = &plan;
    args.scale = scale_;
    args.threads = threads;
    of_core(dynaxx_cpu_forward(&args));
  }

  void decode(const Tensor& q, const Tensor& k, const Tensor& v, float* out, float* lse, int64_t threads) const {
    constexpr int64_t PAGE = 64;
    const std::vector<int32_t> used(k.batch, int32_t(k.seqlen));
    CacheArgs cache{};
    cache.k = k.data;
    cache.v = v.data;
    const Strides k_by = k.strides(), v_by = v.strides();
    cache.k_strides = {k_by.batch, PAGE * k_by.token, k_by.token, k_by.head};
    cache.v_strides = {v_by.batch, PAGE * v_by.token, v_by.token, v_by.head};
    cache.seqused = used.data();
    cache.batch = k.batch;
    cache.kv_heads = k.heads;
    cache.max_pages = cache.num_pages = (k.seqlen + PAGE - 1) / PAGE;
    cache.page_size = PAGE;
    cache.head_dim = k.dim;
    cache.head_dim_v = v.dim;
    cache.max_keys = k.seqlen;
    DecodeArgs step{};
    step.cache = &cache;
    step.q = q.data;
    step.q_strides = q.strides();
    step.seqlen_q = q.seqlen;
    step.q_heads = q.heads;
    step.out = out;
    step.lse = lse;
    step.scale = scale_;
    step.threads = threads;
    step.left = -1;
    of_core(dynaxx_cpu_decode(&step));
  }

  static void of_core(int status) {
    if (status == NO_MEMORY) throw std::bad_alloc();
    if (status != OK) throw Refused("the core refused its arguments, status " + std::to_string(status));
  }

  const ort::Api& api_;
  double scale_ = 0;
  int64_t sparse_from_ = 0, always_ = 0, causal_ = 1, tokens_first_ = 0;
  bool any_heads_ = false;  // there is no `plan`
  std::vector<int64_t> plan_;
  LayerRules rules_, all_rules_;
};

// No exception may reach the runtime: it becomes a status with its words.
template <class Run>
ort::Status* status_of_call(const ort::Api& api, const Run& run) {
  try {
    run();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return api.create_status(ort::FAIL, "dynaxx::SparseAttention: out of memory; try a shorter prompt, or chunks of it");
  } catch (const BadInput&) {
    return api.create_status(ort::INVALID_ARGUMENT,
                             "dynaxx::SparseAttention: `plan` is none that this version reads; export the model again");
  } catch (const std::exception& error) {
    return api.create_status(ort::INVALID_ARGUMENT, (std::string("dynaxx::SparseAttention: ") + error.what()).c_str());
  }
}

struct Operator : ort::CustomOp {
  Operator() : ort::CustomOp() {
    version = ort::VERSION;
    name = [](const CustomOp*) { return "SparseAttention"; };
    provider = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU's
    input_type = [](const CustomOp*, size_t index) { return index == 3 ? ort::BOOL : ort::FLOAT; };
    output_type = [](const CustomOp*, size_t) { return ort::FLOAT; };
    input_count = [](const CustomOp*) -> size_t { return 4; };
    output_count = [](const CustomOp*) -> size_t { return 1; };
    input_characteristic = [](const CustomOp*, size_t index) { return index == 3 ? ort::OPTIONAL : ort::REQUIRED; };
    output_characteristic = [](const CustomOp*, size_t) { return ort::REQUIRED; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    variadic_input_least = variadic_output_least = [](const CustomOp*) { return 1; };
    variadic_input_alike = variadic_output_alike = [](const CustomOp*) { return 1; };
    first_version = [](const CustomOp*) { return 1; };
    last_version = [](const CustomOp*) { return INT32_MAX; };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    create_v2 = [](const CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** kernel) -> ort::Status* {
      return status_of_call(*api, [&] { *kernel = new Kernel(*api, info); });
    };
    compute_v2 = [](void* kernel, ort::KernelContext* context) -> ort::Status* {
      return status_of_call(*used_api, [&] { static_cast<Kernel*>(kernel)->compute(context); });
    };
  }

  static const ort::Api* used_api;
};

const ort::Api* Operator::used_api = nullptr;

}  // namespace

// What ONNX Runtime calls as it loads the library.
extern "C" DYNAXX_EXPORT ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base) {
  dynaxx::remember_process();
  static const Operator op;
  const ort::Api* api = base->get(ort::VERSION);
  if (!api) {
    const std::string said = std::string("dynaxx needs ONNX Runtime >= 1.17, got ") + base->version();
    return base->get(1)->create_status(ort::NOT_IMPLEMENTED, said.c_str());
  }
  Operator::used_api = api;
  static ort::Domain* domain = nullptr;
  if (!domain) {
    if (ort::Status* status = api->create_domain("dynaxx", &domain)) return status;
    if (ort::Status* status = api->add_op(domain, &op)) return status;
  }
  return api->add_domain(options, domain);
}
