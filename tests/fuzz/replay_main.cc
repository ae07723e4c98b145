// Gives inputs to a fuzz target without libFuzzer, so that any compiler builds it.
//
//   fuzz_<name>_replay DIRECTORY...                     every file of the directories: the corpora as tests
//   fuzz_<name>_replay --seconds N --seed S DIRECTORY...  then changed ones for so long, at random but by the seed;
//                                                       the one at hand lies in fuzz_<name>_replay.input meanwhile
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kLongestInput = 4096;

Bytes read_file(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
}

/// Some bytes of `input` changed, left out, put in or taken from `other`.
Bytes changed(Bytes input, const Bytes& other, std::mt19937_64& random) {
  const auto below = [&random](size_t count) { return static_cast<size_t>(random() % std::max<size_t>(1, count)); };
  for (size_t change = 0, changes = 1 + below(8); change < changes; ++change) {
    const auto at = input.begin() + static_cast<std::ptrdiff_t>(below(input.size() + 1));
    const auto end = at + static_cast<std::ptrdiff_t>(below(static_cast<size_t>(input.end() - at) + 1));
    switch (below(5)) {
      case 0:
        if (at != input.end()) *at = static_cast<uint8_t>(random());
        break;
      case 1:
        if (at != input.end()) *at = static_cast<uint8_t>(*at ^ (1u << below(8)));
        break;
      case 2: input.erase(at, end); break;
      case 3: {
        Bytes fresh(1 + below(16));
        for (uint8_t& byte : fresh) byte = static_cast<uint8_t>(random());
        input.insert(at, fresh.begin(), fresh.end());
        break;
      }
      default: {
        const auto first = other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1));
        input.insert(at, first, other.end());
      }
    }
  }
  input.resize(std::min(input.size(), kLongestInput));
  return input;
}

/// Changed inputs until the time is up; returns how many.
int64_t fuzz(const std::vector<Bytes>& corpus, int seconds, uint64_t seed, const std::string& path) {
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t inputs = 0;
  for (; std::chrono::steady_clock::now() < end; ++inputs) {
    const Bytes input = changed(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::filesystem::remove(path);
  return inputs;
}

}  // namespace

int main(int argc, char** argv) {
  int seconds = 0;
  uint64_t seed = 1;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--seconds" && i + 1 < argc) {
      seconds = std::atoi(argv[++i]);
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "no inputs: usage: %s [--seconds N] [--seed S] DIRECTORY...\n", argv[0]);
    return 1;
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    corpus.push_back(read_file(file));
    std::printf("%s: %zu bytes\n", file.filename().c_str(), corpus.back().size());
    std::fflush(stdout);  // a crash must not hide which input it was
    // A copy of exactly this size on the heap, so that AddressSanitizer sees a read beyond it. The empty input is tried
    // too.
    LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
  }
  LLVMFuzzerTestOneInput(nullptr, 0);
  std::printf("%zu inputs\n", files.size());
  if (seconds > 0) {
    const std::string name = std::filesystem::path(argv[0]).filename().string();
    const int64_t inputs = fuzz(corpus, seconds, seed, name + ".input");
    std::printf("%s: %lld changed inputs of seed %llu, no crash\n", name.c_str(), static_cast<long long>(inputs),
                static_cast<unsigned long long>(seed));
  }
  return 0;
}
