#pragma once

#include <cstdlib>
#include <string>

/// ContextOptions::validate_tables, as the environment has it. Outside of folio::testing, which hides ::testing.
namespace folio {

/// Whether contexts that are made while it lives check tables, whatever the environment says. Checks take memory.
class TableChecks {
 public:
  explicit TableChecks(bool on) {
    const char* const given = std::getenv(kName);
    before_ = given == nullptr ? "" : given;
    setenv(kName, on ? "1" : "0", 1);
  }
  ~TableChecks() { setenv(kName, before_.c_str(), 1); }
  TableChecks(const TableChecks&) = delete;
  TableChecks& operator=(const TableChecks&) = delete;

 private:
  static constexpr const char* kName = "FOLIO_VALIDATE_TABLES";
  std::string before_;
};

}  // namespace folio
