#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "views.hpp"

/// Custom masks: bools of the caller's, packed into the bits that kernels read. Request r's block is row-major [its
/// queries, columns], little-endian, and begins on a byte (folio::CustomMask).
namespace folio::python {

/// The bits, a uint8 vector of numpy, or of torch where the masks are torch's; and each block's shape.
struct PackedMask {
  nb::object bits;
  std::vector<MaskShape> shapes;
};

/// Whether AttentionArgs' custom_mask is to be packed: a list or tuple, or an array of bools. Others are bits.
bool is_unpacked_mask(nb::handle source);

/// Packs a list or tuple of [queries, columns] bools, one a request; an array of [requests, queries, columns]; or one
/// of [queries, columns], the only request's. With the shapes of a batch, those are held against it, and a vector of
/// all entries, request after request, is taken too. Throws Error(kInvalidArgument).
PackedMask pack_mask(nb::handle source, const std::string& name, const std::vector<MaskShape>* wanted = nullptr);

/// Each request's queries and mask columns. Lengths must lie on the host.
std::vector<MaskShape> mask_shapes(const BatchView& batch);

/// Throws Error(kInvalidArgument), naming the request, where masks have other shapes than a batch wants.
void require_equal_shapes(const std::vector<MaskShape>& wanted, const std::vector<MaskShape>& shapes,
                          const std::string& name);

}  // namespace folio::python
