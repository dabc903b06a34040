#include "kernels/sparse_attention/tile_products.h"

#include <cmath>
#include <vector>

#include "jumar/runtime.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kUnit = 0x1p-24;

// Picked rows of bf16, heads of bf16, and factors in fp32 that need all of its bits.
class Tiles {
 public:
  Tiles(int64_t n, int64_t cols, int64_t lanes, bool strided)
      : n_(n),
        cols_(cols),
        lanes_(lanes),
        ld_(lanes <= kTileHeads ? kTileHeads : 2 * kTileHeads),
        products_(*ChooseTileProducts()),
        open_(&products_),
        keys_(DType::kBF16, {kKeys, cols}),
        heads_(DType::kBF16, strided ? std::vector<int64_t>{lanes, 2 * cols} : std::vector<int64_t>{lanes, cols + 3}),
        panel_(DType::kF32, {n, ld_}) {
    keys_.FillRandom(1);
    heads_.FillRandom(2);
    Random random(3);
    // Lanes beyond the last head, and the panel's other rows, must reach nothing.
    panel_.Fill([&](int64_t i) { return i % ld_ < lanes ? random.Normal() : std::nan(""); });
    for (int64_t i = 0; i < n; ++i) picks_.push_back(static_cast<int32_t>(i / 2 * 7 % kKeys));
    // strided: every second column.
    operand_ = {heads_.view().data, DType::kBF16, lanes, cols, heads_.view().stride[0], strided ? 2 : 1};
  }

  void Dots(bool accumulate) {
    std::vector<uint16_t> packed(static_cast<size_t>(2 * TileProducts::HeadElements(cols_)), 0xFFFF);
    products_.pack_heads(operand_, packed.data());
    Buffer out(DType::kF32, {n_, ld_});
    out.Fill([](int64_t i) { return static_cast<double>(i % 5); });
    products_.dots({Picked(), packed.data(), CeilDiv(lanes_, kTileHeads), out.view().ptr<float>(), ld_, accumulate});
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t h = 0; h < lanes_; ++h) {
        double sum = accumulate ? static_cast<double>((i * ld_ + h) % 5) : 0, size = sum;
        for (int64_t c = 0; c < cols_; ++c) {
          sum += Key(i, c) * Head(h, c);
          size += std::abs(Key(i, c) * Head(h, c));
        }
        ASSERT_NEAR(out.Get(i * ld_ + h), sum, static_cast<double>(cols_ + 2) * kUnit * size) << i << " " << h;
      }
    }
    out.CheckRedZones("dots");
  }

  void Sums(bool accumulate) {
    const int64_t rows = RoundUp(lanes_, kTileHeads), ld = RoundUp(cols_, kTileSumColumns);
    Buffer out(DType::kF32, {rows, ld});
    out.Fill([](int64_t i) { return static_cast<double>(i % 3); });
    products_.sums({Picked(), panel_.view().ptr<float>(), ld_, lanes_, out.view().ptr<float>(), ld, accumulate});
    for (int64_t h = 0; h < lanes_; ++h) {
      for (int64_t c = 0; c < cols_; ++c) {
        double sum = accumulate ? static_cast<double>((h * ld + c) % 3) : 0, size = sum;
        for (int64_t i = 0; i < n_; ++i) {
          sum += panel_.Get(i * ld_ + h) * Key(i, c);
          size += std::abs(panel_.Get(i * ld_ + h) * Key(i, c));
        }
        ASSERT_NEAR(out.Get(h * ld + c), sum, static_cast<double>(n_ + 4) * kUnit * size) << h << " " << c;
      }
    }
    out.CheckRedZones("sums");
  }

  void Updates() {
    const int64_t block = ld_ * kTileHeads * 2, ld = RoundUp(cols_, 2 * kTileHeads);
    std::vector<uint16_t> packed(static_cast<size_t>(ld / kTileHeads * block), 0xFFFF);
    products_.pack_across(operand_, 0, lanes_, block, packed.data());
    Buffer out(DType::kF32, {kKeys, ld});
    out.Fill([](int64_t i) { return static_cast<double>(i % 3); });
    products_.updates({{out.view().ptr<float>(), ld, picks_.data(), n_, ld},
                       panel_.view().ptr<float>(),
                       ld_,
                       lanes_,
                       packed.data(),
                       block});
    for (int64_t key = 0; key < kKeys; ++key) {
      for (int64_t c = 0; c < cols_; ++c) {
        double sum = static_cast<double>((key * ld + c) % 3), size = sum;
        for (int64_t i = 0; i < n_; ++i) {
          if (picks_[static_cast<size_t>(i)] != key) continue;
          for (int64_t h = 0; h < lanes_; ++h) {
            sum += panel_.Get(i * ld_ + h) * Head(h, c);
            size += std::abs(panel_.Get(i * ld_ + h) * Head(h, c));
          }
        }
        ASSERT_NEAR(out.Get(key * ld + c), sum, static_cast<double>(n_ + 8) * kUnit * size) << key << " " << c;
      }
    }
    out.CheckRedZones("updates");
  }

 private:
  static constexpr int64_t kKeys = 23;
  PickedRows Picked() const { return {keys_.view().data, keys_.view().stride[0], picks_.data(), n_, cols_}; }
  double Key(int64_t i, int64_t c) const { return keys_.Get(picks_[static_cast<size_t>(i)] * cols_ + c); }
  double Head(int64_t h, int64_t c) const { return heads_.Get(h * operand_.row_stride + c * operand_.k_stride); }

  int64_t n_, cols_, lanes_, ld_;
  const TileProducts& products_;
  OpenTiles open_;
  Buffer keys_, heads_, panel_;
  std::vector<int32_t> picks_;
  GemmOperand operand_;
};

TEST(TileProducts, MatchSumsInDouble) {
  if (ChooseTileProducts() == nullptr) GTEST_SKIP() << "no tiles";
  for (const int64_t lanes : {1, 9, 16, 17, 32}) {
    for (const int64_t cols : {1, 31, 64, 150, 300}) {
      for (const int64_t n : {1, 2, 31, 48, 77, 150}) {
        const bool strided = (lanes + cols + n) % 2 == 0;
        Tiles tiles(n, cols, lanes, strided);
        tiles.Dots(false);
        tiles.Dots(true);
        tiles.Sums(false);
        tiles.Sums(true);
        tiles.Updates();
        if (HasFailure()) FAIL() << lanes << " heads, " << cols << " columns, " << n << " rows";
      }
    }
  }
}

TEST(TileProducts, AreThoseOfCpusWithTiles) {
  ForEachSimdTarget([](const std::string& name) {
    EXPECT_EQ(ChooseTileProducts(), name == "AVX3_SPR" ? TileProductsAmx() : nullptr);
  });
}

}  // namespace
}  // namespace jumar::testing
