#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

/// The program as a user meets it: exit codes, what goes to which stream.
namespace cli {

inline const std::string kTraces = FOLIO_EXAMPLE_TRACES;

struct Outcome {
  int code = -1;  ///< exit code, or 1000 + the signal that ended it
  std::string out, err;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A run of the program with its streams in files: pipes' usual case, not a terminal.
class Process {
 public:
  /// `other_out`: where standard output goes instead of a file; `most_memory`: bytes of address space, 0 = no limit;
  /// `launcher`: what starts the program, found in PATH.
  explicit Process(std::vector<std::string> arguments, const std::string& input = "/dev/null",
                   const std::string& other_out = {}, size_t most_memory = 0,
                   const std::vector<std::string>& launcher = {}) {
    static int count = 0;
    base_ = ::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + "_" + std::to_string(count++);
    arguments.insert(arguments.begin(), FOLIO_PROGRAM);
    arguments.insert(arguments.begin(), launcher.begin(), launcher.end());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = other_out.empty() ? base_ + ".out" : other_out;
    const std::string err = base_ + ".err";
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(input.c_str(), O_RDONLY), STDIN_FILENO);
      dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      const rlimit memory = {most_memory, most_memory};
      if (most_memory > 0) setrlimit(RLIMIT_AS, &memory);
      execvp(argv[0], argv.data());
      _exit(127);
    }
  }

  void interrupt() const { kill(pid_, SIGINT); }

  Outcome wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    Outcome outcome;
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    outcome.out = read_file(base_ + ".out");
    outcome.err = read_file(base_ + ".err");
    std::filesystem::remove(base_ + ".out");
    std::filesystem::remove(base_ + ".err");
    return outcome;
  }

 private:
  std::string base_;
  pid_t pid_ = -1;
};

inline Outcome folio(std::vector<std::string> arguments) {
  return Process(std::move(arguments)).wait();
}

/// A replay that takes a fraction of a second, with more options.
inline std::vector<std::string> small_replay(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"replay",         kTraces + "/mooncake_excerpt.jsonl",
                                        "--num-q-heads",  "2",
                                        "--num-kv-heads", "1",
                                        "--head-dim",     "16",
                                        "--requests",     "8",
                                        "--threads",      "2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// What ends with exit code 2, and part of what it says.
struct Misuse {
  std::vector<std::string> arguments;
  std::string says;
};

/// Every one ends with exit code 2 and says what to do.
inline void expect_misuses(const std::vector<Misuse>& misuses) {
  for (const Misuse& misuse : misuses) {
    const Outcome outcome = folio(misuse.arguments);
    EXPECT_EQ(outcome.code, 2) << ::testing::PrintToString(misuse.arguments);
    EXPECT_THAT(outcome.err, ::testing::HasSubstr(misuse.says)) << ::testing::PrintToString(misuse.arguments);
  }
}

/// A file in the temporary folder, removed at the end.
class Scratch {
 public:
  explicit Scratch(const std::string& name, const std::string& text = {})
      : path_(::testing::TempDir() + "folio_cli_" + std::to_string(getpid()) + "_" + name) {
    if (!text.empty()) std::ofstream(path_) << text;
  }
  ~Scratch() { std::filesystem::remove(path_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace cli
