#include "folio/backends/token_pool.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>

#include "backends.hpp"
#include "backends_forward_batch.hpp"
#include "backends_names.hpp"
#include "fields.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "pools.hpp"
#include "rank_names.hpp"

namespace folio::python {
namespace token_pool {
namespace {

/// Memory for lists and offsets that several backends share: int32 [n], written.
struct Buffer {
  Array array;
  std::span<int32_t> view() const { return {static_cast<int32_t*>(array.data), static_cast<size_t>(array.size(0))}; }
};

std::optional<Buffer> to_buffer(nb::handle source, const std::string& name) {
  if (source.is_none()) return std::nullopt;
  Buffer buffer{borrow(source, name, Access::kWrite)};
  if (buffer.array.element != nb::dtype<int32_t>() || buffer.array.rank() != 1 ||
      (buffer.array.size(0) > 1 && buffer.array.stride(0) != 1)) {
    refuse(name + " is " + element_text(buffer.array.element) + " " + shape_text(buffer.array) +
           "; it must be a contiguous vector of int32");
  }
  return buffer;
}

/// The request table: a ReqToTokenPool, a DeviceReqToTokenPool, a PageTableView, or an int32 array [rows, positions].
/// Borrowed: the engine writes into it.
Table to_request_table(nb::handle source, const std::string& name) {
  const Table* given = nullptr;
  if (nb::try_cast(source, given, false) && given != nullptr) return *given;
  const ReqToTokenPool* pool = nullptr;
  const bk::DeviceReqToTokenPool* device_pool = nullptr;
  if ((nb::try_cast(source, pool, false) && pool != nullptr) ||
      (nb::try_cast(source, device_pool, false) && device_pool != nullptr)) {
    return nb::cast<Table>(source.attr("table")());
  }
  Array array = borrow(source, name);
  if (array.element != nb::dtype<int32_t>()) refuse(name + " is " + element_text(array.element) + "; it must be int32");
  if (array.rank() != 2) refuse(name + " has shape " + shape_text(array) + "; it must be [rows, positions]");
  if (array.size(1) > 1 && array.stride(1) != 1) refuse(name + ": a row's entries must be contiguous");
  if (array.size(0) > 1 && array.stride(0) < array.size(1)) refuse(name + ": its rows overlap");
  Table table;
  table.view.kind = PageTableKind::kDense;
  table.view.indices = static_cast<const int32_t*>(array.data);
  table.view.num_rows = static_cast<int32_t>(array.size(0));
  table.view.row_stride = array.size(0) > 1 ? array.stride(0) : array.size(1);
  const bool empty = array.size(0) == 0 || array.size(1) == 0;
  table.view.num_indices = empty ? 0 : (array.size(0) - 1) * table.view.row_stride + array.size(1);
  table.columns = array.size(1);
  table.arrays = {std::move(array)};
  return table;
}

/// Arrays of a batch on a GPU, whose current stream is meant where none is given.
std::vector<Array> device_arrays(const Batch& batch) {
  std::vector<Array> arrays;
  for (const auto* numbers : {&batch.req_pool_indices, &batch.seq_lens}) {
    if (numbers->on_device()) arrays.push_back(*numbers->array());
  }
  return arrays;
}

/// On a CPU slots are held against a pool's size, so that no list leads out of its memory.
void require_pool(const Device& device, const Pool* pool) {
  if (device.type == DeviceType::kCpu && pool == nullptr) {
    refuse("token_to_kv_pool is None; on a CPU every slot is held against its size");
  }
}

/// Arrays of a captured batch, as long as its step is the present one.
struct GraphStep {
  Numbers<int32_t> req_pool_indices, seq_lens, seq_lens_cpu, encoder_lens, encoder_lens_cpu;
  Spec spec_info;
  nb::object pool_object, window_pool_object;
};

/// TokenPoolBackend, with what it borrows. One call at a time.
struct Backend {
  Context context;
  std::shared_ptr<Group> group;  ///< of the ranks that keys are divided over; null: they are not
  bk::TokenPoolBackend backend;
  Table req_to_token;
  std::optional<Table> window_req_to_token;
  std::vector<Buffer> buffers;
  std::mutex mutex;
  nb::object batch;                       ///< of the present step
  std::shared_ptr<GraphStep> graph_step;  ///< likewise
};

struct BackendArguments {
  int32_t num_heads, num_kv_heads, head_dim;
  DType kv_cache_dtype, q_dtype;
  std::optional<int32_t> max_context_len;
  nb::handle req_to_token;
  std::optional<int32_t> max_req_pool_size;
  int32_t v_head_dim;
  KvFormat kv_format;
  int32_t page_size;
  std::optional<int32_t> sliding_window_size;
  nb::handle window_req_to_token;
  bool is_encoder_decoder, skip_prefill;
  nb::handle kv_indptr_buf, kv_last_page_len_buf;
  std::shared_ptr<bk::TokenPoolWorkspace> workspace;
  bool logit_cap;
  bk::ExtendPath extend_path;
  Determinism determinism;
  std::optional<bool> force_tensor_core;
  nb::handle dcp_group;
  int32_t cp_kv_cache_interleave_size;
  std::string dcp_comm_backend;
  distributed::DcpTransport dcp_transport;
  bool dcp_replicated_queries, dcp_all_heads_out;
  std::optional<DType> dcp_partial_dtype;
};

void make_backend(Backend* self, const BackendArguments& given, const std::optional<Context>& given_context) {
  const Context context = context_or_default(given_context);
  const Device device = context.device();
  Table table = to_request_table(given.req_to_token, "req_to_token");
  std::optional<Table> window;
  if (!given.window_req_to_token.is_none()) {
    window = to_request_table(given.window_req_to_token, "window_req_to_token");
    python::require_on(device, window->arrays);
  }
  python::require_on(device, table.arrays);
  std::vector<Buffer> buffers;
  bk::TokenPoolConfig config;
  for (const auto& [source, name, target] :
       {std::tuple(given.kv_indptr_buf, "kv_indptr_buf", &config.kv_indptr_buf),
        std::tuple(given.kv_last_page_len_buf, "kv_last_page_len_buf", &config.kv_last_page_len_buf)}) {
    const std::optional<Buffer> buffer = to_buffer(source, name);
    if (!buffer) continue;
    python::require_on(device, buffer->array);
    *target = buffer->view();
    buffers.push_back(*buffer);
  }
  config.num_heads = given.num_heads;
  config.num_kv_heads = given.num_kv_heads;
  config.head_dim = given.head_dim;
  config.v_head_dim = given.v_head_dim;
  config.kv_cache_dtype = given.kv_cache_dtype;
  config.q_dtype = given.q_dtype;
  config.kv_format = given.kv_format;
  config.page_size = given.page_size;
  config.max_context_len = given.max_context_len.value_or(static_cast<int32_t>(table.columns));
  config.req_to_token = table.view;
  config.max_req_pool_size = given.max_req_pool_size.value_or(table.view.num_rows);
  config.sliding_window_size = given.sliding_window_size;
  if (window) config.window_req_to_token = window->view;
  config.is_encoder_decoder = given.is_encoder_decoder;
  config.skip_prefill = given.skip_prefill;
  config.workspace = given.workspace;
  config.logit_cap = given.logit_cap;
  config.extend_path = given.extend_path;
  config.determinism = given.determinism;
  config.force_tensor_core = given.force_tensor_core;
  std::shared_ptr<Group> group = to_group(given.dcp_group);
  const std::optional<GroupUse> in_use = use(group);
  config.dcp_group = in_use ? &**in_use : nullptr;
  config.cp_kv_cache_interleave_size = given.cp_kv_cache_interleave_size;
  config.dcp_comm_backend = given.dcp_comm_backend;
  config.dcp_transport = given.dcp_transport;
  config.dcp_replicated_queries = given.dcp_replicated_queries;
  config.dcp_all_heads_out = given.dcp_all_heads_out;
  config.dcp_partial_dtype = given.dcp_partial_dtype.value_or(DType::kUnset);
  bk::TokenPoolBackend backend = [&] {
    const ReleasedGil released;
    return bk::TokenPoolBackend(context, config);
  }();
  new (self) Backend{
      context, std::move(group), std::move(backend), std::move(table), std::move(window), std::move(buffers), {}, {},
      {}};
}

const Batch& to_batch(nb::handle source) {
  const Batch* batch = nullptr;
  if (!nb::try_cast(source, batch, false) || batch == nullptr) {
    refuse_kind("forward_batch", "a folio.backends.token_pool.ForwardBatch", source);
  }
  return *batch;
}

void init_forward_metadata(Backend& self, nb::handle forward_batch, nb::handle stream) {
  const Batch& batch = to_batch(forward_batch);
  const Device device = self.context.device();
  require_batch_places(device, batch);
  if (!bk::is_idle(batch.forward_mode)) require_pool(device, batch.pool);
  const std::vector<Array> arrays = device_arrays(batch);
  const Stream queue = to_stream(stream, device, {&arrays});
  const std::optional<GroupUse> in_use = use(self.group);
  const nb::object earlier = std::exchange(self.batch, nb::borrow(forward_batch));  // until nobody reads it any more
  const ReleasedGil released;
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.backend.init_forward_metadata(batch.view(), queue);
}

/// The layer's output: the one given, or one of q's library.
nb::object output_for(nb::handle out, nb::handle q, int64_t tokens, int64_t width) {
  if (!out.is_none()) return nb::borrow(out);
  const nb::tuple shape = nb::make_tuple(tokens, width);
  if (nb::hasattr(q, "new_empty")) return q.attr("new_empty")(shape);
  const nb::object dtype = nb::getattr(q, "dtype", nb::none());
  return nb::module_::import_("numpy").attr("empty")(shape, dtype);
}

enum class Forward { kByMode, kExtend, kDecode };

nb::object forward(Backend& self, nb::handle q, nb::handle k, nb::handle v, const bk::RadixAttention& layer,
                   nb::handle forward_batch, bool save_kv_cache, nb::handle out, nb::handle stream, Forward which) {
  const Batch& batch = to_batch(forward_batch);
  const Device device = self.context.device();
  const bk::TokenPoolConfig& config = self.backend.config();
  std::vector<Array> arrays;
  const auto keep = [&arrays](Tensor tensor) {
    arrays.push_back(std::move(tensor.array));
    return tensor.view;
  };
  const TensorView queries = keep(to_stored_tensor(q, config.q_dtype, "q", Access::kRead));
  ConstTensorView keys, values;
  if (!k.is_none()) keys = keep(to_stored_tensor(k, config.q_dtype, "k", Access::kRead));
  if (!v.is_none()) values = keep(to_stored_tensor(v, config.q_dtype, "v", Access::kRead));
  const int64_t ranks = config.dcp_all_heads_out && self.group ? self.group->size : 1;
  const int64_t width = ranks * layer.num_heads * layer.value_head_dim();
  const nb::object target = output_for(out, q, queries.rank > 0 ? queries.shape[0] : 0, width);
  const TensorView output = keep(to_stored_tensor(target, config.q_dtype, "out", Access::kWrite));
  python::require_on(device, arrays);
  require_batch_places(device, batch);
  const Stream queue = to_stream(stream, device, {&arrays});
  {
    const std::optional<GroupUse> in_use = use(self.group);
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(self.mutex);
    const bk::ForwardBatch view = batch.view();
    switch (which) {
      case Forward::kExtend:
        self.backend.forward_extend(queries, keys, values, layer, view, output, save_kv_cache, queue);
        break;
      case Forward::kDecode:
        self.backend.forward_decode(queries, keys, values, layer, view, output, save_kv_cache, queue);
        break;
      case Forward::kByMode: self.backend.forward(queries, keys, values, layer, view, output, save_kv_cache, queue);
    }
  }
  return target;
}

std::shared_ptr<GraphStep> make_graph_step(const Device& device, nb::handle req_pool_indices, nb::handle seq_lens,
                                           nb::handle seq_lens_cpu, nb::handle encoder_lens,
                                           nb::handle encoder_lens_cpu, const Spec* spec_info, nb::handle pool,
                                           nb::handle window_pool) {
  auto step = std::make_shared<GraphStep>();
  step->req_pool_indices = int32_numbers(req_pool_indices, "req_pool_indices");
  step->seq_lens = int32_numbers(seq_lens, "seq_lens");
  step->seq_lens_cpu = int32_numbers(seq_lens_cpu, "seq_lens_cpu");
  step->encoder_lens = int32_numbers(encoder_lens, "encoder_lens");
  step->encoder_lens_cpu = int32_numbers(encoder_lens_cpu, "encoder_lens_cpu");
  if (spec_info != nullptr) step->spec_info = *spec_info;
  step->pool_object = nb::borrow(pool);
  step->window_pool_object = nb::borrow(window_pool);
  require_places(device, {placed("req_pool_indices", step->req_pool_indices), placed("seq_lens", step->seq_lens),
                          placed("seq_lens_cpu", step->seq_lens_cpu, true), placed("encoder_lens", step->encoder_lens),
                          placed("encoder_lens_cpu", step->encoder_lens_cpu, true)});
  require_spec_places(device, step->spec_info);
  require_pool(device, to_pool(pool, "token_to_kv_pool"));
  require_pool_on(device, to_pool(pool, "token_to_kv_pool"), "token_to_kv_pool");
  require_pool_on(device, to_pool(window_pool, "window_token_to_kv_pool"), "window_token_to_kv_pool");
  return step;
}

bk::GraphBatchExtras extras_of(const GraphStep& step) {
  const Pool* const pool = to_pool(step.pool_object, "token_to_kv_pool");
  const Pool* const window_pool = to_pool(step.window_pool_object, "window_token_to_kv_pool");
  return {step.encoder_lens.view(), step.encoder_lens_cpu.view(), step.spec_info.view(),
          pool == nullptr ? nullptr : pool->pool.get(), window_pool == nullptr ? nullptr : window_pool->pool.get()};
}

Stream stream_of(const Backend& self, const GraphStep& step, nb::handle stream) {
  std::vector<Array> arrays;
  if (step.seq_lens.on_device()) arrays.push_back(*step.seq_lens.array());
  return to_stream(stream, self.context.device(), {&arrays});
}

void capture(Backend& self, int32_t bs, int32_t num_tokens, nb::handle req_pool_indices, nb::handle seq_lens,
             ForwardMode forward_mode, const Spec* spec_info, nb::handle seq_lens_cpu, nb::handle encoder_lens,
             nb::handle encoder_lens_cpu, nb::handle pool, nb::handle window_pool, nb::handle stream) {
  const std::shared_ptr<GraphStep> step =
      make_graph_step(self.context.device(), req_pool_indices, seq_lens, seq_lens_cpu, encoder_lens, encoder_lens_cpu,
                      spec_info, pool, window_pool);
  const bk::GraphBatchExtras extras = extras_of(*step);
  const Stream queue = stream_of(self, *step, stream);
  const std::optional<GroupUse> in_use = use(self.group);
  const std::shared_ptr<GraphStep> earlier = std::exchange(self.graph_step, step);
  const ReleasedGil released;
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.backend.init_forward_metadata_capture_cuda_graph(bs, num_tokens, step->req_pool_indices.view(),
                                                        step->seq_lens.view(), forward_mode, extras,
                                                        step->seq_lens_cpu.view(), queue);
}

void replay(Backend& self, int32_t bs, nb::handle req_pool_indices, nb::handle seq_lens, int64_t seq_lens_sum,
            ForwardMode forward_mode, nb::handle seq_lens_cpu, const Spec* spec_info, nb::handle encoder_lens,
            nb::handle encoder_lens_cpu, nb::handle pool, nb::handle window_pool, nb::handle stream) {
  const std::shared_ptr<GraphStep> step =
      make_graph_step(self.context.device(), req_pool_indices, seq_lens, seq_lens_cpu, encoder_lens, encoder_lens_cpu,
                      spec_info, pool, window_pool);
  const bk::GraphBatchExtras extras = extras_of(*step);
  const Stream queue = stream_of(self, *step, stream);
  const std::optional<GroupUse> in_use = use(self.group);
  const std::shared_ptr<GraphStep> earlier = std::exchange(self.graph_step, step);
  const ReleasedGil released;
  const std::lock_guard<std::mutex> lock(self.mutex);
  self.backend.init_forward_metadata_replay_cuda_graph(bs, step->req_pool_indices.view(), step->seq_lens.view(),
                                                       seq_lens_sum, forward_mode, step->seq_lens_cpu.view(), extras,
                                                       queue);
}

/// One wrapper's lists, copied; on a GPU only what lies on the host.
nb::dict wrapper_lists(const bk::KvWrapper& wrapper, bool on_host) {
  const auto array = [](std::span<const int32_t> values) {
    return nb::cast(to_numpy(std::vector<int32_t>(values.begin(), values.end())));
  };
  nb::dict lists;
  lists["window_left"] = wrapper.window_left;
  lists["page_size"] = wrapper.page_size;
  lists["kv_lens"] = array(wrapper.kv_lens);
  lists["kv_starts"] = array(wrapper.kv_starts);
  if (!on_host) return lists;
  lists["qo_indptr"] = array(wrapper.qo_indptr);
  lists["kv_indptr"] = array(wrapper.kv_indptr);
  lists["kv_indices"] = array(wrapper.kv_indices);
  lists["kv_last_page_len"] = array(wrapper.kv_last_page_len);
  return lists;
}

nb::object forward_metadata(const Backend& self) {
  const bool on_host = self.context.device().type == DeviceType::kCpu;
  const auto lists_of = [on_host](std::span<const bk::KvWrapper> wrappers) {
    nb::list lists;
    for (const bk::KvWrapper& wrapper : wrappers) lists.append(wrapper_lists(wrapper, on_host));
    return lists;
  };
  const auto& metadata = self.backend.forward_metadata();
  nb::dict said;
  if (const auto* decode = std::get_if<bk::DecodeMetadata>(&metadata)) {
    said["decode_wrappers"] = lists_of(decode->decode_wrappers);
  } else if (const auto* prefill = std::get_if<bk::PrefillMetadata>(&metadata)) {
    said["prefill_wrappers"] = lists_of(prefill->prefill_wrappers);
    said["use_ragged"] = prefill->use_ragged;
    said["extend_no_prefix"] = prefill->extend_no_prefix;
  } else {
    return nb::none();
  }
  return said;
}

void bind_layer(nb::module_& m) {
  using Layer = bk::RadixAttention;
  fields_of<Layer>("RadixAttention", "One attention layer of a model.",
                   field("num_heads", &Layer::num_heads, "Query heads."),
                   field("head_dim", &Layer::head_dim, "Of queries and keys."),
                   field("scaling", &Layer::scaling, "Multiplies q . k; 0: 1 / sqrt(head_dim)."),
                   field("num_kv_heads", &Layer::num_kv_heads, "KV heads of one rank."),
                   field("layer_id", &Layer::layer_id, "The pool's layer."),
                   field("logit_cap", &Layer::logit_cap, "c: logits become c * tanh(logits / c); 0: off."),
                   field("v_head_dim", &Layer::v_head_dim, "-1: head_dim."),
                   field("sliding_window_size", &Layer::sliding_window_size,
                         "Keys left of the query that it sees, itself not counted; -1: all."),
                   field("is_cross_attention", &Layer::is_cross_attention, "Over an encoder's keys."),
                   field("attn_type", &Layer::attn_type, "What attention is for."))
      .bind(m)
      .def(
          "forward",
          [](const Layer& self, nb::object backend, nb::object q, nb::object k, nb::object v, nb::object forward_batch,
             bool save_kv_cache, nb::object out, nb::object stream) {
            return backend.attr("forward")(q, k, v, self, forward_batch, save_kv_cache, out,
                                           nb::arg("stream") = stream);
          },
          nb::arg("backend"), nb::arg("q"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("forward_batch"),
          nb::arg("save_kv_cache") = true, nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "backend.forward with this layer.");
}

void bind_backend(nb::module_& m) {
  nb::class_<bk::TokenPoolWorkspace>(m, "TokenPoolWorkspace",
                                     "Scratch memory for any number of backends whose forwards do not overlap; it "
                                     "grows as their kernels need it.")
      .def(
          "__init__",
          [](bk::TokenPoolWorkspace* self, const std::optional<Context>& context) {
            new (self) bk::TokenPoolWorkspace(context_or_default(context));
          },
          nb::arg("context") = nb::none())
      .def_prop_ro("bytes", &bk::TokenPoolWorkspace::bytes, "What it has now.");
  constexpr const char* kForward =
      "A layer's attention over the present step: [tokens, num_heads * v_head_dim], in `out` or a new array of q's "
      "library. q is [tokens, num_heads, head_dim] or [tokens, num_heads * head_dim], k and v likewise with KV heads. "
      "Without k and v the cache is read only; save_kv_cache False: they are in the cache already. Everything is "
      "checked before anything is written.";
  nb::class_<Backend> type(
      m, "TokenPoolBackend",
      "pymllm's and SGLang's attention backend: a step's metadata is made once from lengths and the request table, and "
      "used by every layer's forward, which stores new keys and values in their slots and then attends. req_to_token "
      "is "
      "an int32 array [rows, positions], a ReqToTokenPool, a DeviceReqToTokenPool or a PageTableView; it is borrowed, "
      "and rows must name the "
      "new "
      "tokens' slots before init_forward_metadata. max_context_len and max_req_pool_size are the table's where they "
      "are "
      "left out. With sliding_window_size W, wrapper 0 serves layers with that window (W keys left of the query), "
      "wrapper 1 the others. dcp_group: the rank's ProcessGroup, where the ranks of a group divide every request's "
      "keys; table and slots are then the rank's own. Without a context the process's CPU context is used. Calls from "
      "several threads wait for "
      "each other, but a step's calls must come in order.");
  type.def(
          "__init__",
          [](Backend* self, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, DType kv_cache_dtype,
             DType q_dtype, std::optional<int32_t> max_context_len, nb::object req_to_token,
             std::optional<int32_t> max_req_pool_size, int32_t v_head_dim, KvFormat kv_format, int32_t page_size,
             std::optional<int32_t> sliding_window_size, nb::object window_req_to_token, bool is_encoder_decoder,
             bool skip_prefill, nb::object kv_indptr_buf, nb::object kv_last_page_len_buf,
             std::shared_ptr<bk::TokenPoolWorkspace> workspace, bool logit_cap, bk::ExtendPath extend_path,
             Determinism determinism, std::optional<bool> force_tensor_core, nb::object dcp_group,
             int32_t cp_kv_cache_interleave_size, const std::string& dcp_comm_backend,
             distributed::DcpTransport dcp_transport, bool dcp_replicated_queries, bool dcp_all_heads_out,
             std::optional<DType> dcp_partial_dtype, const std::optional<Context>& context) {
            make_backend(self,
                         {num_heads,
                          num_kv_heads,
                          head_dim,
                          kv_cache_dtype,
                          q_dtype,
                          max_context_len,
                          req_to_token,
                          max_req_pool_size,
                          v_head_dim,
                          kv_format,
                          page_size,
                          sliding_window_size,
                          window_req_to_token,
                          is_encoder_decoder,
                          skip_prefill,
                          kv_indptr_buf,
                          kv_last_page_len_buf,
                          std::move(workspace),
                          logit_cap,
                          extend_path,
                          determinism,
                          force_tensor_core,
                          dcp_group,
                          cp_kv_cache_interleave_size,
                          dcp_comm_backend,
                          dcp_transport,
                          dcp_replicated_queries,
                          dcp_all_heads_out,
                          dcp_partial_dtype},
                         context);
          },
          nb::kw_only(), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("kv_cache_dtype") = DType::kFloat16, nb::arg("q_dtype") = DType::kFloat16,
          nb::arg("max_context_len") = nb::none(), nb::arg("req_to_token"), nb::arg("max_req_pool_size") = nb::none(),
          nb::arg("v_head_dim") = -1, nb::arg("kv_format") = KvFormat::kStrided, nb::arg("page_size") = 1,
          nb::arg("sliding_window_size") = nb::none(), nb::arg("window_req_to_token") = nb::none(),
          nb::arg("is_encoder_decoder") = false, nb::arg("skip_prefill") = false, nb::arg("kv_indptr_buf") = nb::none(),
          nb::arg("kv_last_page_len_buf") = nb::none(), nb::arg("workspace").none() = nb::none(),
          nb::arg("logit_cap") = false, nb::arg("extend_path") = bk::ExtendPath::kAuto,
          nb::arg("determinism") = Determinism::kRunToRun, nb::arg("force_tensor_core") = nb::none(),
          nb::arg("dcp_group") = nb::none(), nb::arg("cp_kv_cache_interleave_size") = 1,
          nb::arg("dcp_comm_backend") = "ag_rs", nb::arg("dcp_transport") = distributed::DcpTransport::kAuto,
          nb::arg("dcp_replicated_queries") = false, nb::arg("dcp_all_heads_out") = false,
          nb::arg("dcp_partial_dtype") = nb::none(), nb::arg("context") = nb::none())
      .def("init_forward_metadata", &init_forward_metadata, nb::arg("forward_batch"), nb::kw_only(),
           nb::arg("stream") = nb::none(),
           "Builds the step's lists and plans. Raises InvalidArgument for a batch that contradicts itself or the "
           "configuration; there is then no metadata.");
  for (const auto& [name, which] : {std::pair("forward", Forward::kByMode),
                                    {"forward_extend", Forward::kExtend},
                                    {"forward_decode", Forward::kDecode}}) {
    type.def(
        name,
        [which = which](Backend& self, nb::object q, nb::object k, nb::object v, const bk::RadixAttention& layer,
                        nb::object forward_batch, bool save_kv_cache, nb::object out, nb::object stream) {
          return forward(self, q, k, v, layer, forward_batch, save_kv_cache, out, stream, which);
        },
        nb::arg("q"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("layer"), nb::arg("forward_batch"),
        nb::arg("save_kv_cache") = true, nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
        kForward);
  }
  type.def(
          "check_plans",
          [](Backend& self) {
            const std::optional<GroupUse> in_use = use(self.group);
            const ReleasedGil released;
            const std::lock_guard<std::mutex> lock(self.mutex);
            self.backend.check_plans();
          },
          "Raises what kernels of earlier steps have reported, once, or that the group has failed; waits for nothing.")
      .def_prop_ro(
          "forward_metadata", &forward_metadata,
          "The present step, None before the first: a dict with decode_wrappers, or with prefill_wrappers, use_ragged "
          "and extend_no_prefix. A wrapper is a dict of copies: window_left, page_size, kv_lens, kv_starts, and on a "
          "CPU "
          "qo_indptr, kv_indptr, kv_indices, kv_last_page_len.")
      .def(
          "get_cuda_graph_seq_len_fill_value",
          [](const Backend& self) { return self.backend.get_cuda_graph_seq_len_fill_value(); },
          "The length that padding requests of captured batches get: 1.")
      .def(
          "init_cuda_graph_state",
          [](Backend& self, int32_t max_bs, int32_t max_num_tokens, nb::object kv_indices_buf) {
            const std::optional<Buffer> buffer = to_buffer(kv_indices_buf, "kv_indices_buf");
            if (buffer) {
              python::require_on(self.context.device(), buffer->array);
              self.buffers.push_back(*buffer);
            }
            const std::optional<GroupUse> in_use = use(self.group);
            const ReleasedGil released;
            const std::lock_guard<std::mutex> lock(self.mutex);
            self.backend.init_cuda_graph_state(max_bs, max_num_tokens, buffer ? buffer->view() : std::span<int32_t>());
          },
          nb::arg("max_bs"), nb::arg("max_num_tokens"), nb::arg("kv_indices_buf") = nb::none(),
          "Memory for captured batches of up to max_bs requests and max_num_tokens queries. Forgets earlier captures.")
      .def("init_forward_metadata_capture_cuda_graph", &capture, nb::arg("bs"), nb::arg("num_tokens"),
           nb::arg("req_pool_indices"), nb::arg("seq_lens"), nb::arg("forward_mode"), nb::kw_only(),
           nb::arg("spec_info").none() = nb::none(), nb::arg("seq_lens_cpu") = nb::none(),
           nb::arg("encoder_lens") = nb::none(), nb::arg("encoder_lens_cpu") = nb::none(),
           nb::arg("token_to_kv_pool") = nb::none(), nb::arg("window_token_to_kv_pool") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Metadata for capturing batches of bs requests: decodes or target_verify. On a CPU forwards just run, and "
           "token_to_kv_pool must be given, against whose size slots are held.")
      .def("init_forward_metadata_replay_cuda_graph", &replay, nb::arg("bs"), nb::arg("req_pool_indices"),
           nb::arg("seq_lens"), nb::arg("seq_lens_sum"), nb::arg("forward_mode"), nb::arg("seq_lens_cpu") = nb::none(),
           nb::kw_only(), nb::arg("spec_info").none() = nb::none(), nb::arg("encoder_lens") = nb::none(),
           nb::arg("encoder_lens_cpu") = nb::none(), nb::arg("token_to_kv_pool") = nb::none(),
           nb::arg("window_token_to_kv_pool") = nb::none(), nb::arg("stream") = nb::none(),
           "Metadata for replaying a captured batch: the same shape, other lengths and slots; call it before the graph "
           "is launched. On a CPU forwards follow. seq_lens_sum counts padding; -1: not checked.")
      .def_prop_ro("dispatch_reason", [](const Backend& self) { return self.backend.dispatch_reason(); })
      .def_prop_ro("num_wrappers", [](const Backend& self) { return self.backend.num_wrappers(); })
      .def(
          "wrapper_index",
          [](const Backend& self, const bk::RadixAttention& layer) { return self.backend.wrapper_index(layer); },
          nb::arg("layer"), "Which wrapper serves the layer.")
      .def_prop_ro("decode_use_tensor_cores",
                   [](const Backend& self) { return self.backend.decode_use_tensor_cores(); })
      .def_prop_ro("kernel_name", [](const Backend& self) { return self.backend.kernel_name(); })
      .def_prop_ro("context", [](const Backend& self) { return Context(self.context); });
  m.def("should_use_tensor_core", &bk::should_use_tensor_core, nb::arg("kv_cache_dtype"),
        nb::arg("num_attention_heads"), nb::arg("num_kv_heads"), nb::arg("forced") = nb::none(),
        "Whether FlashInfer would decode on tensor cores: pymllm's rule.");
  m.def("capture_batch_sizes", &bk::capture_batch_sizes, nb::arg("max_running_requests"),
        "The batch sizes that pymllm captures, ascending.");
}

}  // namespace
}  // namespace token_pool

void bind_token_pool(nb::module_& m) {
  bind_enum<bk::ForwardMode>(m);
  bind_enum<bk::ExtendPath>(m);
  bind_enum<bk::WrapperDispatch>(m);
  bind_enum<bk::RadixAttentionType>(m);
  token_pool::bind_forward_batch(m);
  token_pool::bind_layer(m);
  token_pool::bind_backend(m);
  token_pool::bind_step_inputs(m);
}

}  // namespace folio::python
