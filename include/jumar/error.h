// Errors that a caller can act on. Every message begins with the operator's name and shows the offending value.
#pragma once

#include <stdexcept>
#include <string>

namespace jumar {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace jumar
