#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace folio::replay {

/// A file that a command writes its results to. It is opened before the work begins, so that a path that cannot be
/// written costs no work. What the file held stays until the first write.
class OutputFile {
 public:
  /// "-" is standard output. Throws folio::Error(kInvalidArgument) if it cannot be opened.
  explicit OutputFile(const std::string& path);

  /// Appends `text`. A failure is kept for `close`: the work goes on, and other results are written.
  void write(std::string_view text);

  /// Ends the file. Throws folio::Error(kInvalidArgument) if any of it could not be written.
  void close();

 private:
  std::string name_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  bool written_ = false;  ///< anything yet
  int failure_ = 0;       ///< errno of the first write that failed
};

/// The file of an option that may be left out: none for an empty path.
std::optional<OutputFile> output_file(const std::string& path);

}  // namespace folio::replay
