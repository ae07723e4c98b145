// Gives every file of the directories named on the command line to a fuzz target, without libFuzzer: the corpora as
// tests.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
  }
  if (files.empty()) {
    std::fprintf(stderr, "no inputs: usage: %s DIRECTORY...\n", argv[0]);
    return 1;
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    std::printf("%s: %zu bytes\n", file.filename().c_str(), bytes.size());
    std::fflush(stdout);  // a crash must not hide which input it was
    // A copy of exactly this size on the heap, so that AddressSanitizer sees a read beyond it. The empty input is tried
    // too.
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  LLVMFuzzerTestOneInput(nullptr, 0);
  std::printf("%zu inputs\n", files.size());
  return 0;
}
