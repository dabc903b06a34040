// The tile registers of AMX. Include it in files compiled for AMX only; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jumar {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tile state of this thread while it multiplies; released at the end so that it costs nothing in a context switch.
class Tiles {
 public:
  Tiles() {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = 16;
    }
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace jumar
