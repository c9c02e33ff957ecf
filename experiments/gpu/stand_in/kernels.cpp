#include "kernels.h"

#include <cstdint>
#include <cstring>

namespace {

template <class T>
T argument(void** arguments, int index, size_t offset = 0) {
  T value;
  std::memcpy(&value, static_cast<char*>(arguments[index]) + offset, sizeof value);
  return value;
}

// Calls `body` with a value of the type whose letter mangled names use.
template <class Body>
Work by_type(char letter, Body body) {
  switch (letter) {
    case 'f': return body(float{});
    case 'd': return body(double{});
    case 'i': return body(int32_t{});
    case 'l': return body(int64_t{});
    case 'a': return body(int8_t{});
    case 'h': return body(uint8_t{});
    case 'b': return body(bool{});
    default: return {};
  }
}

// The letter of the type in `functor<letter>`; 0 where the name does not have the functor.
char type_of(const std::string& name, const char* functor) {
  const std::string begin = std::string(functor) + "I";
  const size_t at = name.find(begin);
  return at == std::string::npos ? 0 : name[at + begin.size()];
}

// Of all elementwise kernels those whose tensors lie one element beside the next. Their arguments: the number of
// elements, the functor with its scalars, and the addresses, that of the output first.
Work elementwise(const std::string& name, void** arguments) {
  const auto count = argument<int>(arguments, 0);
  const auto address = [&](int index) { return argument<char*>(arguments, 2, index * sizeof(char*)); };
  if (const char letter = type_of(name, "FillFunctor")) {
    return by_type(letter, [&](auto of) -> Work {
      using T = decltype(of);
      const auto value = argument<T>(arguments, 1);
      return [out = reinterpret_cast<T*>(address(0)), count, value] { std::fill(out, out + count, value); };
    });
  }
  if (const char letter = type_of(name, "CUDAFunctorOnSelf_add")) {
    return by_type(letter, [&](auto of) -> Work {
      using T = decltype(of);
      // Small integers are computed in int, as everywhere in C.
      using Scalar = std::conditional_t<(sizeof(T) < 4), int32_t, T>;
      const bool wide = name.find("OnSelf_addIh") == std::string::npos && name.find("OnSelf_addIa") == std::string::npos;
      const Scalar other = wide ? argument<Scalar>(arguments, 1) : argument<T>(arguments, 1);
      const Scalar alpha = wide ? argument<Scalar>(arguments, 1, sizeof(Scalar)) : argument<T>(arguments, 1, sizeof(T));
      return [out = reinterpret_cast<T*>(address(0)), in = reinterpret_cast<T*>(address(1)), count, other, alpha] {
        for (int i = 0; i < count; i++) out[i] = static_cast<T>(in[i] + alpha * other);
      };
    });
  }
  if (const char letter = type_of(name, "CUDAFunctor_add")) {
    return by_type(letter, [&](auto of) -> Work {
      using T = decltype(of);
      const auto alpha = argument<T>(arguments, 1);
      return [out = reinterpret_cast<T*>(address(0)), x = reinterpret_cast<T*>(address(1)), y = reinterpret_cast<T*>(address(2)),
              count, alpha] {
        for (int i = 0; i < count; i++) out[i] = static_cast<T>(x[i] + alpha * y[i]);
      };
    });
  }
  if (const char letter = type_of(name, "MulFunctor"); letter && name.find("UnaryFunctor") == std::string::npos) {
    return by_type(letter, [&](auto of) -> Work {
      using T = decltype(of);
      return [out = reinterpret_cast<T*>(address(0)), x = reinterpret_cast<T*>(address(1)), y = reinterpret_cast<T*>(address(2)),
              count] {
        for (int i = 0; i < count; i++) out[i] = static_cast<T>(x[i] * y[i]);
      };
    });
  }
  return {};
}

// Rows by number: torch.index_select of rows whose bytes are aligned. (out, in, numbers, how many, bytes of a row,
// rows that there are, bytes from row to row of in and of out, ...)
Work gather_of_bytes(void** arguments) {
  auto* out = argument<char*>(arguments, 0);
  auto* in = argument<char*>(arguments, 1);
  auto* rows = argument<int64_t*>(arguments, 2);
  const auto count = argument<int>(arguments, 3);
  const auto size = argument<int64_t>(arguments, 4);
  const auto from_step = argument<int64_t>(arguments, 6), to_step = argument<int64_t>(arguments, 7);
  return [=] {
    for (int i = 0; i < count; i++) std::memcpy(out + i * to_step, in + rows[i] * from_step, size);
  };
}

// torch's description of a tensor in such kernels: its address, up to 25 sizes, and as many strides.
template <class Index>
struct TensorInfo {
  char* data;
  Index sizes[25], strides[25];
};

// torch.index_select of int64: (out, in, numbers, dimension in out, dimension in in, ..., words of a row, ...)
template <class Index>
Work gather_of_words(void** arguments, bool is_small) {
  const auto out = argument<TensorInfo<Index>>(arguments, 0), in = argument<TensorInfo<Index>>(arguments, 1),
             rows = argument<TensorInfo<Index>>(arguments, 2);
  const auto out_step = out.strides[argument<int>(arguments, 3)], in_step = in.strides[argument<int>(arguments, 4)];
  // The kernel for many rows has the number of all words before.
  const auto words = argument<Index>(arguments, is_small ? 5 : 6);
  return [to = reinterpret_cast<int64_t*>(out.data), from = reinterpret_cast<int64_t*>(in.data),
          numbers = reinterpret_cast<int64_t*>(rows.data), count = rows.sizes[0], out_step, in_step, words] {
    for (Index i = 0; i < count; i++) std::memcpy(to + i * out_step, from + numbers[i] * in_step, words * sizeof(int64_t));
  };
}

}  // namespace

Work work_of_kernel(const std::string& name, void** arguments) {
  const auto has = [&](const char* words) { return name.find(words) != std::string::npos; };
  if (has("vectorized_elementwise_kernel")) return elementwise(name, arguments);
  if (has("vectorized_gather_kernel")) return gather_of_bytes(arguments);
  for (const bool is_small : {true, false}) {
    const std::string kernel = is_small ? "indexSelectSmallIndexIll" : "indexSelectLargeIndexIll";
    if (has((kernel + "j").c_str())) return gather_of_words<uint32_t>(arguments, is_small);
    if (has((kernel + "m").c_str())) return gather_of_words<uint64_t>(arguments, is_small);
  }
  return {};
}
