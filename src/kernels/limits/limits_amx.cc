#include "kernels/limits/limits_kernels.h"

#if defined(__AMX_BF16__)
#include "kernels/gemm/amx_tiles.h"

namespace jumar {
namespace {

float Run(int64_t rounds) {
  const Tiles tiles;
  alignas(64) float out[16 * 16];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  return out[0];
}

}  // namespace

// A tile product is 16 x 16 x 32 multiply-adds.
PeakKernel PeakAmx() { return {4 * 16384.0, &Run}; }

}  // namespace jumar
#else
namespace jumar {
PeakKernel PeakAmx() { return {}; }
}  // namespace jumar
#endif
