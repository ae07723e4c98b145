#include "backends_forward_batch.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "integers.hpp"

namespace folio::python::token_pool {

void require_places(const Device& device, std::initializer_list<Placed> all) {
  for (const Placed& one : all) {
    if (!one.given) continue;
    const bool wants_host = one.host || device.type == DeviceType::kCpu;
    if (one.array->has_value() && wants_host) {
      refuse(std::string(one.name) + " lies on " + describe((*one.array)->place) + "; it is read on the host");
    }
    if (!one.array->has_value() && !wants_host) {
      refuse(std::string(one.name) + " lies on the host; the context is " + describe(device));
    }
    if (one.array->has_value()) python::require_on(device, **one.array);
  }
}

void require_spec_places(const Device& device, const Spec& spec) {
  require_places(
      device,
      {placed("spec_info.tree_mask", spec.tree_mask), placed("spec_info.tree_mask_cpu", spec.tree_mask_cpu, true),
       placed("spec_info.kv_indptr", spec.kv_indptr), placed("spec_info.kv_indices", spec.kv_indices),
       placed("spec_info.kv_indptr_cpu", spec.kv_indptr_cpu, true)});
}

const Pool* to_pool(nb::handle source, const std::string& name) {
  if (source.is_none()) return nullptr;
  const Pool* pool = nullptr;
  if (!nb::try_cast(source, pool, false) || pool == nullptr) {
    refuse_kind(name, "a folio.KvPool", source);
  }
  return pool;
}

void require_pool_on(const Device& device, const Pool* pool, const char* name) {
  if (pool == nullptr) return;
  Array first = pool->k.front();
  first.name = name;
  python::require_on(device, first);
}

void require_batch_places(const Device& device, const Batch& batch) {
  require_places(
      device,
      {placed("req_pool_indices", batch.req_pool_indices), placed("seq_lens", batch.seq_lens),
       placed("seq_lens_cpu", batch.seq_lens_cpu, true), placed("extend_prefix_lens", batch.extend_prefix_lens),
       placed("extend_prefix_lens_cpu", batch.extend_prefix_lens_cpu, true),
       placed("extend_seq_lens", batch.extend_seq_lens), placed("extend_seq_lens_cpu", batch.extend_seq_lens_cpu, true),
       placed("encoder_lens", batch.encoder_lens), placed("encoder_lens_cpu", batch.encoder_lens_cpu, true),
       placed("out_cache_loc", batch.out_cache_loc), placed("encoder_out_cache_loc", batch.encoder_out_cache_loc),
       placed("window_out_cache_loc", batch.window_out_cache_loc)});
  require_spec_places(device, batch.spec_info);
  require_pool_on(device, batch.pool, "token_to_kv_pool");
  require_pool_on(device, batch.window_pool, "window_token_to_kv_pool");
}

namespace {

/// A batch's array: a copy where it lies on the host.
template <typename T>
nb::object numbers_object(const Numbers<T>& numbers) {
  const std::span<const T> values = numbers.view();
  if (!numbers.on_device()) return nb::cast(to_numpy(std::vector<T>(values.begin(), values.end())));
  return nb::cast(numbers.array()->memory);
}

}  // namespace

void bind_forward_batch(nb::module_& m) {
  nb::class_<Spec>(
      m, "SpecInfo",
      "What speculative decoding adds to a batch. Target verify: draft_token_num tokens a request, the "
      "last accepted one included, and for trees tree_mask, draft_token_num x draft_token_num bits a "
      "request, row-major, little-endian, from a byte of its own (tree_mask_cpu: the same on the host). "
      "Decodes of a draft model with several branches: rows of slots, kv_indptr [rows + 1] and kv_indices.")
      .def(
          "__init__",
          [](Spec* self, int32_t draft_token_num, nb::object tree_mask, nb::object tree_mask_cpu, nb::object kv_indptr,
             nb::object kv_indices, nb::object kv_indptr_cpu) {
            new (self) Spec{draft_token_num,
                            flag_numbers(tree_mask, "tree_mask"),
                            flag_numbers(tree_mask_cpu, "tree_mask_cpu"),
                            int32_numbers(kv_indptr, "kv_indptr"),
                            int32_numbers(kv_indices, "kv_indices"),
                            int32_numbers(kv_indptr_cpu, "kv_indptr_cpu")};
          },
          nb::kw_only(), nb::arg("draft_token_num") = 0, nb::arg("tree_mask") = nb::none(),
          nb::arg("tree_mask_cpu") = nb::none(), nb::arg("kv_indptr") = nb::none(), nb::arg("kv_indices") = nb::none(),
          nb::arg("kv_indptr_cpu") = nb::none())
      .def_ro("draft_token_num", &Spec::draft_token_num);
  nb::class_<Batch>(
      m, "ForwardBatch",
      "One step's batch. req_pool_indices [R]: rows of the request table. seq_lens [R]: tokens of each request in the "
      "cache after this step (target verify: before its drafts). out_cache_loc [tokens]: the slot of each new token, "
      "int64 or int32; negative is not stored. Extends: extend_prefix_lens, tokens cached before; extend_seq_lens, new "
      "tokens. Encoder-decoders: encoder_lens and encoder_out_cache_loc. Those that end with _cpu are copies on the "
      "host, from which steps of a GPU are planned; on a CPU they may be left out. Arrays on the host are read when "
      "this "
      "object is made, those on a GPU are borrowed. The pools are folio.KvPool.")
      .def(
          "__init__",
          [](Batch* self, ForwardMode forward_mode, nb::object req_pool_indices, nb::object seq_lens,
             nb::object out_cache_loc, nb::object token_to_kv_pool, std::optional<int32_t> batch_size,
             std::optional<int64_t> seq_lens_sum, nb::object seq_lens_cpu, nb::object extend_prefix_lens,
             nb::object extend_prefix_lens_cpu, nb::object extend_seq_lens, nb::object extend_seq_lens_cpu,
             nb::object encoder_lens, nb::object encoder_lens_cpu, nb::object encoder_out_cache_loc,
             const Spec* spec_info, nb::object window_token_to_kv_pool, nb::object window_out_cache_loc) {
            Batch batch;
            batch.forward_mode = forward_mode;
            batch.req_pool_indices = int32_numbers(req_pool_indices, "req_pool_indices");
            batch.seq_lens = int32_numbers(seq_lens, "seq_lens");
            batch.batch_size = batch_size.value_or(
                static_cast<int32_t>(std::max(batch.req_pool_indices.view().size(), batch.seq_lens.view().size())));
            batch.seq_lens_sum = seq_lens_sum.value_or(-1);
            batch.seq_lens_cpu = int32_numbers(seq_lens_cpu, "seq_lens_cpu");
            batch.out_cache_loc = int64_numbers(out_cache_loc, "out_cache_loc");
            batch.extend_prefix_lens = int32_numbers(extend_prefix_lens, "extend_prefix_lens");
            batch.extend_prefix_lens_cpu = int32_numbers(extend_prefix_lens_cpu, "extend_prefix_lens_cpu");
            batch.extend_seq_lens = int32_numbers(extend_seq_lens, "extend_seq_lens");
            batch.extend_seq_lens_cpu = int32_numbers(extend_seq_lens_cpu, "extend_seq_lens_cpu");
            batch.encoder_lens = int32_numbers(encoder_lens, "encoder_lens");
            batch.encoder_lens_cpu = int32_numbers(encoder_lens_cpu, "encoder_lens_cpu");
            batch.encoder_out_cache_loc = int64_numbers(encoder_out_cache_loc, "encoder_out_cache_loc");
            batch.window_out_cache_loc = int64_numbers(window_out_cache_loc, "window_out_cache_loc");
            if (spec_info != nullptr) batch.spec_info = *spec_info;
            batch.pool = to_pool(token_to_kv_pool, "token_to_kv_pool");
            batch.window_pool = to_pool(window_token_to_kv_pool, "window_token_to_kv_pool");
            batch.pool_object = std::move(token_to_kv_pool);
            batch.window_pool_object = std::move(window_token_to_kv_pool);
            new (self) Batch(std::move(batch));
          },
          nb::kw_only(), nb::arg("forward_mode"), nb::arg("req_pool_indices") = nb::none(),
          nb::arg("seq_lens") = nb::none(), nb::arg("out_cache_loc") = nb::none(),
          nb::arg("token_to_kv_pool") = nb::none(), nb::arg("batch_size") = nb::none(),
          nb::arg("seq_lens_sum") = nb::none(), nb::arg("seq_lens_cpu") = nb::none(),
          nb::arg("extend_prefix_lens") = nb::none(), nb::arg("extend_prefix_lens_cpu") = nb::none(),
          nb::arg("extend_seq_lens") = nb::none(), nb::arg("extend_seq_lens_cpu") = nb::none(),
          nb::arg("encoder_lens") = nb::none(), nb::arg("encoder_lens_cpu") = nb::none(),
          nb::arg("encoder_out_cache_loc") = nb::none(), nb::arg("spec_info").none() = nb::none(),
          nb::arg("window_token_to_kv_pool") = nb::none(), nb::arg("window_out_cache_loc") = nb::none())
      .def_ro("forward_mode", &Batch::forward_mode)
      .def_ro("batch_size", &Batch::batch_size)
      .def_prop_ro(
          "seq_lens_sum", [](const Batch& self) { return self.seq_lens_sum; }, "-1: unknown.")
      .def_prop_ro("req_pool_indices", [](const Batch& self) { return numbers_object(self.req_pool_indices); })
      .def_prop_ro("seq_lens", [](const Batch& self) { return numbers_object(self.seq_lens); })
      .def_prop_ro("seq_lens_cpu", [](const Batch& self) { return numbers_object(self.seq_lens_cpu); })
      .def_prop_ro(
          "out_cache_loc", [](const Batch& self) { return numbers_object(self.out_cache_loc); },
          "Arrays on the host are copies, those on a GPU for torch.from_dlpack and its like.")
      .def_prop_ro("token_to_kv_pool", [](const Batch& self) { return self.pool_object; })
      .def("__repr__", [](const Batch& self) {
        return "<folio.backends.token_pool.ForwardBatch: " + std::string(to_string(self.forward_mode)) + " of " +
               std::to_string(self.batch_size) + " requests>";
      });
}

}  // namespace folio::python::token_pool
