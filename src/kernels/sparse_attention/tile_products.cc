#include "kernels/sparse_attention/tile_products.h"

#include "jumar/runtime.h"

namespace jumar {

const TileProducts* ChooseTileProducts() { return SimdAllows("AVX3_SPR") ? TileProductsAmx() : nullptr; }

}  // namespace jumar
