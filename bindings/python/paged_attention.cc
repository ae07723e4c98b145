#include "folio/paged_attention.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device_call.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"

/// Attention in one call: what is prepared and planned is found again by context and stream.
namespace folio::python {
namespace {

/// Of one context and stream, for one thread at a time.
struct StreamAttention {
  StreamAttention(const Context& its_context, Stream its_stream)
      : context(its_context), stream(its_stream), attention(its_context, its_stream) {}
  bool is_of(const Context& other, Stream other_stream) const {
    return &context.state() == &other.state() && stream.handle == other_stream.handle;
  }
  Context context;
  Stream stream;
  std::mutex mutex;
  PagedAttention attention;
};

/// The contexts of calls that give none, and the attentions of the contexts and streams that were used last.
class Attentions {
 public:
  static constexpr size_t kMost = 16;

  /// Alive as long as the process: at its end other threads may still be in a call.
  static Attentions& get() {
    static auto& attentions = *new Attentions;
    return attentions;
  }

  Context context_of(const Place& place) {
    const std::lock_guard lock(mutex_);
    const int32_t index = place.host ? -1 : place.cuda_index;
    const auto found = contexts_.find(index);
    if (found != contexts_.end()) return found->second;
    return contexts_.emplace(index, index < 0 ? Context::cpu() : Context::cuda(index)).first->second;
  }

  std::shared_ptr<StreamAttention> find_or_make(const Context& context, Stream stream) {
    const std::lock_guard lock(mutex_);
    auto found = std::ranges::find_if(used_, [&](const auto& attention) { return attention->is_of(context, stream); });
    if (found == used_.end()) {
      if (used_.size() == kMost) used_.pop_back();
      found = used_.insert(used_.end(), std::make_shared<StreamAttention>(context, stream));
    }
    std::rotate(used_.begin(), found, found + 1);
    return used_.front();
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, Context> contexts_;                 ///< by CUDA device; -1: the CPU
  std::vector<std::shared_ptr<StreamAttention>> used_;  ///< the last one first
};

/// A view, or arrays [pages, page_size, heads, head_dim].
Cache to_cache(nb::handle k_cache, nb::handle v_cache) {
  const Cache* given = nullptr;
  if (!nb::try_cast(k_cache, given, false) || given == nullptr) {
    if (v_cache.is_none()) refuse("v_cache is None; it is left out where k_cache is a folio.KvCacheView");
    return make_nhd_cache(k_cache, v_cache);
  }
  if (!v_cache.is_none()) refuse("v_cache is given with a folio.KvCacheView, which has the values; give None");
  return *given;
}

const float* per_head(DeviceCall& call, nb::handle source, const std::string& name, int64_t heads) {
  if (source.is_none()) return nullptr;
  const std::span<const float> values = call.floats(source, name);
  if (static_cast<int64_t>(values.size()) != heads) {
    refuse(name + " has " + std::to_string(values.size()) + " entries; there are " + std::to_string(heads) +
           " q heads");
  }
  return values.data();
}

std::vector<int32_t> to_cu_q(nb::handle source) {
  if (source.is_none()) return {};
  std::vector<int32_t> cu_q = to_int32s(source, "cu_q");
  if (cu_q.empty()) refuse("cu_q is empty; it has one entry more than requests, or is None for one token a request");
  return cu_q;
}

/// An array of q's library, on its device; bfloat16 where q is fp8.
nb::object make_output(nb::handle q, const TensorView& queries, int32_t head_dim_v, const std::vector<int32_t>& cu_q) {
  if (!cu_q.empty() && cu_q.back() != queries.shape[0]) {
    refuse("out is None, and cu_q ends at " + std::to_string(cu_q.back()) + " of q's " +
           std::to_string(queries.shape[0]) + " tokens: the others are padding, which is not written; give out");
  }
  const nb::tuple shape = nb::make_tuple(queries.shape[0], queries.shape[1], head_dim_v);
  const bool fp8 = is_fp8(queries.dtype);
  if (nb::hasattr(q, "new_empty")) {  // torch
    if (fp8) return q.attr("new_empty")(shape, nb::arg("dtype") = nb::module_::import_("torch").attr("bfloat16"));
    return q.attr("new_empty")(shape);
  }
  const bool cupy = library_of(q) == Library::kCupy;
  const nb::object arrays = cupy ? nb::module_::import_("cupy") : nb::steal(PyImport_GetModule(nb::str("numpy").ptr()));
  if (fp8 || !arrays.is_valid() || !nb::isinstance(q, nb::object(arrays.attr("ndarray")))) {
    refuse("out is None; it is made for tensors of torch, and for float arrays of numpy and CuPy. Give out");
  }
  return arrays.attr("empty")(shape, nb::object(q.attr("dtype")));
}

nb::object attend(nb::handle q, nb::handle k_cache, nb::handle v_cache, nb::handle page_table, nb::handle seq_lens,
                  nb::handle cu_q, nb::object out, nb::handle lse, float sm_scale, bool causal, int32_t window_left,
                  int32_t window_right, float logits_soft_cap, nb::handle alibi_slopes, nb::handle sinks,
                  nb::handle k_scale, nb::handle v_scale, nb::handle q_scale, nb::handle out_scale,
                  Determinism determinism, const std::optional<Context>& context, nb::handle stream) {
  const Tensor queries = to_tensor(q, "q", Access::kRead);
  if (queries.view.rank != 3) {
    refuse("q has shape " + shape_text(queries.array) + "; it must be [tokens, q heads, head_dim]");
  }
  const Context where = context ? *context : Attentions::get().context_of(queries.array.place);
  const int64_t heads = queries.view.shape[1];
  DeviceCall call(where);
  call.keep({queries.array});
  PagedAttentionArgs args;
  args.q = queries.view;
  args.cache = call.cache(to_cache(k_cache, v_cache), "cache", Access::kRead);
  const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
  const std::vector<int32_t> offsets = to_cu_q(cu_q);
  args.seq_lens = lens;
  args.cu_q = offsets;
  const Table table = to_table(page_table, "page_table");
  const OwnTable own_table(call, table, lens, args.cache.page_size);
  args.page_table = own_table.view;
  const Lse sums = to_lse(lse, "lse");
  require_lse(sums.array, queries.view.shape[0], heads);
  if (sums.array) call.keep({*sums.array});
  args.lse = sums.view;
  args.sm_scale = sm_scale;
  args.causal = causal;
  args.window_left = window_left;
  args.window_right = window_right;
  args.logits_soft_cap = logits_soft_cap;
  args.alibi_slopes = per_head(call, alibi_slopes, "alibi_slopes", heads);
  args.sinks = per_head(call, sinks, "sinks", heads);
  const auto requests = static_cast<int64_t>(lens.size());
  const auto scale_of = [&](nb::handle source, const char* name) {
    return call.scale(source, name, args.cache.num_kv_heads, requests);
  };
  args.k_scale = scale_of(k_scale, "k_scale");
  args.v_scale = scale_of(v_scale, "v_scale");
  args.q_scale = scale_of(q_scale, "q_scale");
  args.out_scale = scale_of(out_scale, "out_scale");
  args.determinism = determinism;
  if (out.is_none()) out = make_output(q, queries.view, args.cache.head_dim_v, offsets);
  args.out = call.tensor(out, "out", Access::kWrite);
  const auto attention = Attentions::get().find_or_make(where, call.stream(stream));
  {
    const ReleasedGil released;
    const std::lock_guard lock(attention->mutex);
    attention->attention(args);
  }
  return out;
}

}  // namespace

void bind_paged_attention(nb::module_& m) {
  m.def(
      "paged_attention", &attend, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache").none(), nb::arg("page_table"),
      nb::arg("seq_lens"), nb::kw_only(), nb::arg("cu_q") = nb::none(), nb::arg("out") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("sm_scale") = 0.0f, nb::arg("causal") = true, nb::arg("window_left") = -1,
      nb::arg("window_right") = -1, nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(),
      nb::arg("sinks") = nb::none(), nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f, nb::arg("q_scale") = 1.0f,
      nb::arg("out_scale") = 1.0f, nb::arg("determinism") = Determinism::kRunToRun, nb::arg("context") = nb::none(),
      nb::arg("stream") = nb::none(),
      nb::sig("def paged_attention(q: object, k_cache: object | KvCacheView, v_cache: object | None, "
              "page_table: object | PageTableView, seq_lens: object, *, cu_q: object | None = None, "
              "out: object | None = None, lse: object | None = None, sm_scale: float = 0.0, causal: bool = True, "
              "window_left: int = -1, window_right: int = -1, logits_soft_cap: float = 0.0, "
              "alibi_slopes: object | None = None, sinks: object | None = None, k_scale: object = 1.0, "
              "v_scale: object = 1.0, q_scale: object = 1.0, out_scale: object = 1.0, "
              "determinism: Determinism | str = ..., context: Context | None = None, "
              "stream: object | None = None) -> object"),
      "Attention of one layer over a paged KV cache in one call, for decode, prefill and both in one batch. Returns "
      "`out`.\n\n"
      "q: [tokens, q heads, head_dim], the requests' tokens one after the other. k_cache, v_cache: [pages, page_size, "
      "kv heads, head_dim], of any strides but the innermost; or k_cache a KvCacheView and v_cache None. The batch's "
      "own keys and values have been written (write_kv_cache). page_table: page ids [requests, columns], or a "
      "PageTableView. seq_lens: [requests], keys of each request, those of its tokens in q included. cu_q: [requests + "
      "1], where each request's tokens begin in q; None is one token a request (decode). out: None is a new array of "
      "q's library, of its dtype (bfloat16 for fp8). lse: float32 [tokens, q heads], written too. sm_scale: 0 is 1 / "
      "sqrt(head_dim). The other keywords are those of AttentionConfig, AttentionArgs and SegmentArgs. seq_lens and "
      "cu_q are read on the host, wherever q lies: give a list or a host array.\n\n"
      "context: None is that of q's device, made once a process. stream: None is the current one, as current_stream "
      "says. What is prepared and planned is kept for the next call, for the 16 contexts and streams that were used "
      "last: calls with equal lengths, such as the layers of one step, share a plan. Calls of one context and stream "
      "run one after the other. On a CPU page ids are checked. folio.Layer and folio.Step cost less a call, and serve "
      "CUDA "
      "graphs.\n\n"
      "Raises InvalidArgument naming the argument, folio.Error (UNSUPPORTED) where no kernel takes it; nothing was "
      "written then.");
}

}  // namespace folio::python
