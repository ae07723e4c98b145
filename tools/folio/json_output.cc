#include "json_output.hpp"

namespace folio::cli {

void write_json(const nlohmann::ordered_json& json, replay::OutputFile& file) {
  file.write(json.dump(1) + "\n");
  file.close();
}

}  // namespace folio::cli
