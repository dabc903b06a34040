// The operator in fp64, readable by eye.
#pragma once

#include <vector>

namespace jumar::example::ref {

struct Gradients {
  std::vector<double> dinput;
  std::vector<double> dgate;
};

inline double Relu(double x) { return x < 0 ? 0 : x; }

inline std::vector<double> SquaredReluGlu(const std::vector<double>& input, const std::vector<double>& gate) {
  std::vector<double> y(input.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = Relu(input[i]) * Relu(input[i]) * gate[i];
  return y;
}

inline Gradients SquaredReluGluBackward(const std::vector<double>& dy, const std::vector<double>& input,
                                        const std::vector<double>& gate) {
  Gradients out{std::vector<double>(dy.size()), std::vector<double>(dy.size())};
  for (size_t i = 0; i < dy.size(); ++i) {
    const double r = Relu(input[i]);
    out.dinput[i] = dy[i] * gate[i] * 2 * r;
    out.dgate[i] = dy[i] * r * r;
  }
  return out;
}

}  // namespace jumar::example::ref
