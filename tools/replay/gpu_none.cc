#include "folio/types/error.hpp"
#include "replay/gpu.hpp"

namespace folio::replay::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnavailable, "this build has no CUDA; --device cpu is offered");
}

}  // namespace

std::shared_ptr<std::byte> allocate(const Context&, size_t) {
  refuse();
}
std::shared_ptr<std::byte> allocate_shared(const Context&, size_t) {
  refuse();
}
void upload(const Context&, void*, const void*, size_t) {
  refuse();
}
void wait(const Context& context) {
  if (is_gpu(context)) refuse();
}
CapturedWork::CapturedWork(const Context&, const std::function<void(Stream)>&) {
  refuse();
}
void CapturedWork::launch() const {
  refuse();
}
int32_t count() {
  return 0;
}
double copy_rate(const Context&, size_t, double) {
  refuse();
}

}  // namespace folio::replay::gpu
