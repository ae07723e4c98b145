#include "replay/output_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

[[noreturn]] void fail(const std::string& name, int error) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be written: {}", name, std::strerror(error)));
}

int leave_open(std::FILE* file) {
  return std::fflush(file);
}

std::FILE* open_for_writing(const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  std::FILE* const file = descriptor < 0 ? nullptr : fdopen(descriptor, "w");
  if (file == nullptr) fail(path, errno);
  return file;
}

}  // namespace

OutputFile::OutputFile(const std::string& path)
    : name_(path == "-" ? "standard output" : path),
      file_(path == "-" ? stdout : open_for_writing(path), path == "-" ? &leave_open : &std::fclose) {}

void OutputFile::write(std::string_view text) {
  if (!written_ && file_.get() != stdout) {
    // Devices and pipes have no length to cut; what cannot be written at all shows in the write.
    static_cast<void>(ftruncate(fileno(file_.get()), 0) == 0);
  }
  written_ = true;
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() && failure_ == 0) failure_ = errno;
}

void OutputFile::close() {
  if (!written_) write({});
  const auto finish = file_.get_deleter();
  errno = 0;
  if (finish(file_.release()) != 0 && failure_ == 0) failure_ = errno;
  if (failure_ != 0) fail(name_, failure_);
}

std::optional<OutputFile> output_file(const std::string& path) {
  if (path.empty()) return std::nullopt;
  return OutputFile(path);
}

}  // namespace folio::replay
