// Run-time choice of a Highway target that respects JUMAR_SIMD even on the very first call.
// Include it before hwy/foreach_target.h; it includes no Highway header, which must come after that one.
#pragma once

namespace jumar {

// Reads JUMAR_SIMD once. Throws Error for an unknown name.
void InitSimd();

}  // namespace jumar

// Calls the best version of FUNC (exported by HWY_EXPORT in the same file) under the cap.
#define JUMAR_DISPATCH(FUNC) (::jumar::InitSimd(), HWY_DYNAMIC_DISPATCH(FUNC))
