// Links the group over NCCL, which needs neither libnccl nor a GPU to say that it is not for a CPU.
#include <folio/distributed/nccl_group.hpp>

#include <cstdio>

int main() {
  try {
    folio::distributed::make_nccl_group(folio::Context::cpu(), {});
  } catch (const folio::Error& error) {
    std::printf("%s\n", error.what());
    return error.code() == folio::ErrorCode::kInvalidArgument ? 0 : 1;
  }
  return 1;
}
