#include "kernels.h"

#include <sys/mman.h>

#include <cstdint>
#include <complex>
#include <cstring>

namespace {

template <class T>
T read(const char* memory) {
  T value;
  std::memcpy(&value, memory, sizeof value);
  return value;
}

template <class T>
T argument(void** arguments, int index) {
  return read<T>(static_cast<char*>(arguments[index]));
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

// The output and the inputs of an elementwise kernel, and the scalars that its functor holds.
struct Operands {
  int count;
  char* tensors[3] = {};
  const char* scalars;
  // Where elements do not lie side by side: the sizes of the dimensions, the quickest first, and the strides in bytes.
  int num_dimensions = 0;
  uint32_t sizes[25], strides[25][3];

  // (number of elements, functor, addresses)
  static Operands side_by_side(void** arguments, size_t num_tensors) {
    Operands found;
    found.count = argument<int>(arguments, 0);
    found.scalars = static_cast<char*>(arguments[1]);
    std::memcpy(found.tensors, arguments[2], num_tensors * sizeof(char*));
    return found;
  }

  // (number of elements, {number of dimensions, 25 sizes with two numbers to divide by them quickly, 25 x 3 strides, addresses, functor})
  static Operands of_three(void** arguments) {
    Operands found;
    const auto* memory = static_cast<char*>(arguments[1]);
    found.count = argument<int>(arguments, 0);
    found.num_dimensions = read<int>(memory);
    for (int i = 0; i < found.num_dimensions; i++) found.sizes[i] = read<uint32_t>(memory + 4 + 12 * i);
    std::memcpy(found.strides, memory + 304, sizeof found.strides);
    std::memcpy(found.tensors, memory + 608, sizeof found.tensors);
    found.scalars = memory + 632;
    return found;
  }

  template <class T>
  T& at(int tensor, int element) const {
    if (!num_dimensions) return reinterpret_cast<T*>(tensors[tensor])[element];
    char* address = tensors[tensor];
    for (int i = 0; i < num_dimensions; i++) {
      address += element % sizes[i] * strides[i][tensor];
      element /= static_cast<int>(sizes[i]);
    }
    return *reinterpret_cast<T*>(address);
  }
};

template <class T, class Function>
Work for_each(const Operands& operands, Function function) {
  return [operands, function] {
    for (int i = 0; i < operands.count; i++) operands.at<T>(0, i) = static_cast<T>(function(operands, i));
  };
}

// Whole pages are given back: they are zero when they are next read, and cost nothing until then.
void clear(char* begin, size_t bytes) {
  const auto round_up = [](char* address) { return reinterpret_cast<char*>((reinterpret_cast<size_t>(address) + 4095) & ~size_t{4095}); };
  char *end = begin + bytes, *first = round_up(begin), *last = round_up(end) - 4096;
  if (first >= last || madvise(first, last - first, MADV_DONTNEED)) first = last = end;
  std::memset(begin, 0, first - begin);
  std::memset(last, 0, end - last);
}

Work elementwise(const std::string& name, void** arguments) {
  const bool has_strides = name.find("vectorized_elementwise_kernel") == std::string::npos;
  const auto operands = [&](size_t num_tensors) {
    return has_strides ? Operands::of_three(arguments) : Operands::side_by_side(arguments, num_tensors);
  };
  if (const char letter = type_of(name, "CUDAFunctor_add"))
    return by_type(letter, [&](auto of) {
      using T = decltype(of);
      const Operands found = operands(3);
      const T alpha = read<T>(found.scalars);
      return for_each<T>(found, [alpha](const Operands& o, int i) { return o.at<T>(1, i) + alpha * o.at<T>(2, i); });
    });
  if (const char letter = type_of(name, "MulFunctor"); letter && name.find("UnaryFunctor") == std::string::npos)
    return by_type(letter, [&](auto of) {
      using T = decltype(of);
      return for_each<T>(operands(3), [](const Operands& o, int i) { return o.at<T>(1, i) * o.at<T>(2, i); });
    });
  if (has_strides) return {};
  if (const char letter = type_of(name, "FillFunctor"))
    return by_type(letter, [&](auto of) {
      using T = decltype(of);
      const Operands found = operands(1);
      const T value = read<T>(found.scalars);
      if (value == T{}) return Work([found] { clear(found.tensors[0], found.count * sizeof(T)); });
      return for_each<T>(found, [value](const Operands&, int) { return value; });
    });
  if (const char letter = type_of(name, "CUDAFunctorOnSelf_add"))
    return by_type(letter, [&](auto of) {
      using T = decltype(of);
      const Operands found = operands(2);
      const T sum = static_cast<T>(read<T>(found.scalars) * read<T>(found.scalars + sizeof(T)));
      return for_each<T>(found, [sum](const Operands& o, int i) { return o.at<T>(1, i) + sum; });
    });
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

// torch.index_select of complex128: (out, in, numbers, dimension in out, dimension in in, ..., words of a row, ...)
template <class Index>
Work gather_of_words(void** arguments, bool is_small) {
  const auto out = argument<TensorInfo<Index>>(arguments, 0), in = argument<TensorInfo<Index>>(arguments, 1),
             rows = argument<TensorInfo<Index>>(arguments, 2);
  const auto out_step = out.strides[argument<int>(arguments, 3)], in_step = in.strides[argument<int>(arguments, 4)];
  // The kernel for many rows has the number of all words before.
  const auto words = argument<Index>(arguments, is_small ? 5 : 6);
  using Word = std::complex<double>;
  return [to = reinterpret_cast<Word*>(out.data), from = reinterpret_cast<Word*>(in.data),
          numbers = reinterpret_cast<int64_t*>(rows.data), count = rows.sizes[0], out_step, in_step, words] {
    for (Index i = 0; i < count; i++) std::memcpy(to + i * out_step, from + numbers[i] * in_step, words * sizeof(Word));
  };
}

}  // namespace

Work work_of_kernel(const std::string& name, void** arguments) {
  const auto has = [&](const char* words) { return name.find(words) != std::string::npos; };
  if (has("elementwise_kernelI")) return elementwise(name, arguments);
  if (has("vectorized_gather_kernel")) return gather_of_bytes(arguments);
  for (const bool is_small : {true, false}) {
    const std::string kernel = std::string(is_small ? "indexSelectSmallIndex" : "indexSelectLargeIndex") + "IN3c107complexIdEEl";
    if (has((kernel + "j").c_str())) return gather_of_words<uint32_t>(arguments, is_small);
    if (has((kernel + "m").c_str())) return gather_of_words<uint64_t>(arguments, is_small);
  }
  return {};
}
