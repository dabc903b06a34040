// The operator table and the C entry points that the Python package uses.
#include <memory>
#include <string>

#include "base/simd_dispatch.h"
#include "torch/binding.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using torch::stable::detail::StableLibrary;

// Defines every operator of the table in `ns`; for a namespace other than "jumar" only those that carry a vendor's
// name. Fragments, so that another library may add operators to the same namespace.
void Register(const std::string& ns) {
  // Registrations last as long as the process.
  auto* definitions = new StableLibrary(StableLibrary::Kind::FRAGMENT, ns.c_str(), nullptr, __FILE__, __LINE__);
  auto* kernels = new StableLibrary(StableLibrary::Kind::IMPL, ns.c_str(), "CPU", __FILE__, __LINE__);
  for (const auto& family : Families()) {
    for (const OpEntry& op : family) {
      if (ns != "jumar" && !op.vendor_name) continue;
      definitions->def(op.schema);
      const std::string schema = op.schema;
      kernels->impl(schema.substr(0, schema.find('(')).c_str(), op.kernel);
    }
  }
}

std::string Join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

// Runs f and returns its text, which stays valid until the next call on this thread.
template <typename F>
const char* Text(const F& f) {
  thread_local std::string text;
  text = f();
  return text.c_str();
}

// As Text, for functions whose result is only success (null) or an error text.
template <typename F>
const char* Try(const F& f) {
  thread_local std::string text;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    text = e.what();
    return text.c_str();
  }
}

}  // namespace
}  // namespace jumar::binding

#define JUMAR_API extern "C" __attribute__((visibility("default")))

// Both return null or an error text.
JUMAR_API const char* jumar_register(const char* ns) {
  return jumar::binding::Try([&] {
    jumar::InitSimd();
    jumar::binding::Register(ns);
  });
}
JUMAR_API const char* jumar_set_simd_target(const char* name) {
  return jumar::binding::Try([&] { jumar::SetSimdTarget(name); });
}

JUMAR_API const char* jumar_simd_target() {
  return jumar::binding::Text([] { return jumar::SimdTarget(); });
}
// Comma-separated, best first.
JUMAR_API const char* jumar_simd_targets() {
  return jumar::binding::Text([] { return jumar::binding::Join(jumar::SimdTargets()); });
}
JUMAR_API int jumar_num_threads() { return jumar::NumThreads(); }

// "name=count" pairs, comma-separated.
JUMAR_API const char* jumar_call_counts() {
  return jumar::binding::Text([] {
    std::vector<std::string> parts;
    for (const auto& [op, calls] : jumar::CallCounts()) parts.push_back(op + "=" + std::to_string(calls));
    return jumar::binding::Join(parts);
  });
}
JUMAR_API void jumar_reset_call_counts() { jumar::ResetCallCounts(); }
