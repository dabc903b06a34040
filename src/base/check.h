// JUMAR_CHECK(op, condition, parts...): throws jumar::Error "op: parts..." when the condition is false.
#pragma once

#include <sstream>
#include <string>

#include "jumar/error.h"

namespace jumar {

template <typename... Parts>
[[noreturn]] void Fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace jumar

#define JUMAR_CHECK(op, condition, ...) \
  do {                                  \
    if (!(condition)) [[unlikely]]      \
      ::jumar::Fail(op, __VA_ARGS__);   \
  } while (false)
