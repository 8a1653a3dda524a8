/* The codecs of offbeat.wire, each in one pass over memory. The same bytes and bits as the versions in plain torch: see
   integers.py, halves.py and topk.py for what is computed. Values are finite.

   A block is copied to the stack before it is encoded: the compiler then knows that nothing overlaps, also where the
   residual replaces the values. */

#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef float f32;

#define INLINE static inline __attribute__((always_inline))
#define INFINITE 0x7f800000u
#define TINY (47u << 23) /* 2^-80 */
#define LARGEST 0x1.fffffep127f

INLINE f32 as_float(u32 bits) { f32 x; memcpy(&x, &bits, 4); return x; }
INLINE u32 as_bits(f32 x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
INLINE u32 load16(const u8 *p) { u16 x; memcpy(&x, p, 2); return x; }
INLINE void store16(u8 *p, u32 bits) { u16 x = (u16)bits; memcpy(p, &x, 2); }
INLINE u32 bf16_up(f32 magnitude) { return (as_bits(magnitude) + 0xffffu) >> 16; }

/* The largest absolute value as bits, which are ordered as the values are. */
INLINE u32 copy_largest(const f32 *x, int width, f32 *values) {
  u32 largest = 0;
  for (int j = 0; j < width; ++j) {
    values[j] = x[j];
    u32 size = as_bits(x[j]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  return largest;
}

i64 offbeat_is_finite(const f32 *x, i64 n) {
  u32 largest = 0;
  for (i64 j = 0; j < n; ++j) {
    u32 size = as_bits(x[j]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  return largest < INFINITE;
}

/* A codec of whole blocks and then one that may be shorter. `arguments` are those of kernel_arguments(). */
#define CODEC(encode, decode, block, record, encode_block, decode_block)                                               \
  void encode(const f32 *x, i64 n, u8 *out, f32 *residual, const i64 *arguments) {                                     \
    for (; n >= block; n -= block, x += block, out += record, residual = residual ? residual + block : 0)              \
      encode_block(x, block, out, residual, arguments);                                                                \
    if (n) encode_block(x, (int)n, out, residual, arguments);                                                          \
  }                                                                                                                    \
  void decode(const u8 *data, i64 n, f32 *out, i64 add, const i64 *arguments) {                                        \
    for (; n >= block; n -= block, out += block, data += record) decode_block(data, block, out, add != 0, arguments);  \
    if (n) decode_block(data, (int)n, out, add != 0, arguments);                                                       \
  }

/* Integers: see IntCodec. */

INLINE void encode_int_block(const f32 *x, int width, u8 *out, f32 *residual, int bits, int low, int high, int is_signed,
                            u32 cap) {
  f32 values[256];
  int codes[256 + 8], up = 0;
  u32 down = 0; /* the largest negative value as unsigned bits; of the positive ones as signed bits */
  for (int j = 0; j < width; ++j) {
    values[j] = x[j];
    u32 one = as_bits(x[j]);
    up = (int)one > up ? (int)one : up;
    down = one > down ? one : down;
  }
  u32 positive = (u32)up, negative = down >> 31 ? down & 0x7fffffffu : 0;
  u32 largest = positive > negative ? positive : negative;
  u32 scale_bits = bf16_up(as_float(largest) * (1.0f / (f32)high));
  if (scale_bits > cap) scale_bits = cap;
  if (largest < TINY) scale_bits = 0;
  if (is_signed && negative > positive && scale_bits) scale_bits |= 0x8000u;
  f32 scale = as_float(scale_bits << 16), inverse = scale_bits ? 1.0f / scale : 0.0f;
  store16(out, scale_bits);
  out += 2;
  for (int j = 0; j < width; ++j) {
    f32 q = __builtin_rintf(values[j] * inverse);
    q = q < (f32)low ? (f32)low : q;
    q = q > (f32)high ? (f32)high : q;
    codes[j] = (int)q - low;
  }
  if (residual)
    for (int j = 0; j < width; ++j) residual[j] = values[j] - (f32)(codes[j] + low) * scale;
  int per_byte = 8 / bits, stride = (width + per_byte - 1) / per_byte;
  for (int j = width; j < stride * per_byte; ++j) codes[j] = 0;
  if (bits == 8)
    for (int j = 0; j < stride; ++j) out[j] = (u8)codes[j];
  if (bits == 4)
    for (int j = 0; j < stride; ++j) out[j] = (u8)(codes[j] | codes[j + stride] << 4);
  if (bits == 2)
    for (int j = 0; j < stride; ++j)
      out[j] = (u8)(codes[j] | codes[j + stride] << 2 | codes[j + 2 * stride] << 4 | codes[j + 3 * stride] << 6);
}

INLINE void decode_int_block(const u8 *data, int width, f32 *out, int add, int bits, int low) {
  u8 packed[256];
  f32 values[256 + 8];
  int per_byte = 8 / bits, stride = (width + per_byte - 1) / per_byte, mask = (1 << bits) - 1;
  f32 scale = as_float(load16(data) << 16);
  memcpy(packed, data + 2, stride);
  for (int plane = 0; plane < per_byte; ++plane)
    for (int j = 0; j < stride; ++j)
      values[plane * stride + j] = (f32)((packed[j] >> plane * bits & mask) + low) * scale;
  if (add)
    for (int j = 0; j < width; ++j) out[j] += values[j];
  else
    for (int j = 0; j < width; ++j) out[j] = values[j];
}

#define INT_CODEC(name, encode, decode, block, bits, low, high, is_signed, cap)                                        \
  INLINE void encode_##name(const f32 *x, int width, u8 *out, f32 *residual, const i64 *unused) {                      \
    encode_int_block(x, width, out, residual, bits, low, high, is_signed, cap);                                        \
  }                                                                                                                    \
  INLINE void decode_##name(const u8 *data, int width, f32 *out, int add, const i64 *unused) {                         \
    decode_int_block(data, width, out, add, bits, low);                                                                \
  }                                                                                                                    \
  CODEC(encode, decode, block, 2 + block * bits / 8, encode_##name, decode_##name)

INT_CODEC(int8, offbeat_encode_int8, offbeat_decode_int8, 256, 8, -127, 127, 0, 0x7c01u)
INT_CODEC(int4, offbeat_encode_int4, offbeat_decode_int4, 64, 4, -7, 8, 1, 0x7dffu)
INT_CODEC(int2, offbeat_encode_int2, offbeat_decode_int2, 32, 2, -1, 2, 1, 0x7effu)

/* Half precision. */

#define HALVES 256

INLINE void encode_bf16(const f32 *x, int width, u8 *out, f32 *residual, const i64 *unused) {
  f32 values[HALVES];
  u16 codes[HALVES];
  memcpy(values, x, 4 * width);
  for (int j = 0; j < width; ++j) {
    u32 bits = as_bits(values[j]), size = bits & 0x7fffffffu;
    u32 rounded = (size + 0x7fffu + (size >> 16 & 1u)) >> 16;
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
    codes[j] = (u16)(rounded | (bits >> 16 & 0x8000u));
  }
  if (residual)
    for (int j = 0; j < width; ++j) residual[j] = values[j] - as_float((u32)codes[j] << 16);
  memcpy(out, codes, 2 * width);
}

INLINE void decode_bf16(const u8 *data, int width, f32 *out, int add, const i64 *unused) {
  u16 codes[HALVES];
  memcpy(codes, data, 2 * width);
  if (add)
    for (int j = 0; j < width; ++j) out[j] += as_float((u32)codes[j] << 16);
  else
    for (int j = 0; j < width; ++j) out[j] = as_float((u32)codes[j] << 16);
}

CODEC(offbeat_encode_bf16, offbeat_decode_bf16, HALVES, 2 * HALVES, encode_bf16, decode_bf16)

/* These two work on whole multiples of 8; blocks have room for it. */
INLINE void to_half(const f32 *values, u16 *codes, int width) {
#if defined(__F16C__)
  for (int j = 0; j < width; j += 8)
    _mm_storeu_si128((__m128i *)(codes + j), _mm256_cvtps_ph(_mm256_loadu_ps(values + j), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int j = 0; j < width; ++j) { _Float16 h = (_Float16)values[j]; memcpy(codes + j, &h, 2); }
#endif
}

INLINE void from_half(const u16 *codes, f32 *values, int width) {
#if defined(__F16C__)
  for (int j = 0; j < width; j += 8)
    _mm256_storeu_ps(values + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(codes + j))));
#else
  for (int j = 0; j < width; ++j) { _Float16 h; memcpy(&h, codes + j, 2); values[j] = (f32)h; }
#endif
}

INLINE void encode_fp16(const f32 *x, int width, u8 *out, f32 *residual, const i64 *unused) {
  f32 values[HALVES], scaled[HALVES] = {0};
  u16 codes[HALVES];
  u32 largest = copy_largest(x, width, values);
  u32 exponent = (largest >> 23) - 15;
  f32 scale = 0, inverse = 0;
  if (largest >= TINY) scale = as_float(exponent << 23), inverse = as_float((254 - exponent) << 23);
  for (int j = 0; j < width; ++j) {
    f32 one = values[j] * inverse;
    one = one < -65504.0f ? -65504.0f : one;
    scaled[j] = one > 65504.0f ? 65504.0f : one;
  }
  to_half(scaled, codes, width);
  if (residual) {
    from_half(codes, scaled, width);
    for (int j = 0; j < width; ++j) residual[j] = values[j] - scaled[j] * scale;
  }
  store16(out, as_bits(scale) >> 16);
  memcpy(out + 2, codes, 2 * width);
}

INLINE void decode_fp16(const u8 *data, int width, f32 *out, int add, const i64 *unused) {
  u16 codes[HALVES] = {0};
  f32 values[HALVES], scale = as_float(load16(data) << 16);
  memcpy(codes, data + 2, 2 * width);
  from_half(codes, values, width);
  if (add)
    for (int j = 0; j < width; ++j) out[j] += values[j] * scale;
  else
    for (int j = 0; j < width; ++j) out[j] = values[j] * scale;
}

CODEC(offbeat_encode_fp16, offbeat_decode_fp16, HALVES, 2 + 2 * HALVES, encode_fp16, decode_fp16)

/* Top-k: see TopK. */

#define CHUNK 4096

struct layout { i64 width, k, low, unary, bytes; };

/* The arguments are the bits of a value, then the layouts of a whole chunk and of the last one. */
INLINE const struct layout *layout_of(const i64 *arguments, int width) {
  return (const struct layout *)(arguments + 1) + (width != CHUNK);
}

INLINE void put(u8 *p, i64 at, u32 value) {
  p += at >> 3;
  for (value <<= at & 7; value; value >>= 8) *p++ |= (u8)value;
}

INLINE u32 get(const u8 *p, i64 at, int count) {
  u32 value = 0;
  for (int i = 0; i < count; ++i, ++at) value |= (u32)(p[at >> 3] >> (at & 7) & 1) << i;
  return value;
}

static int count_from(const u16 *keys, int width, u16 least) {
  u16 count = 0;
  for (int j = 0; j < width; ++j) count += keys[j] >= least;
  return count;
}

/* The k-th largest of a few keys. */
static u16 kth_of(const u16 *keys, int width, int k) {
  u16 found = 0;
  for (int bit = 15; bit >= 0; --bit) {
    u16 tried = (u16)(found | 1u << bit);
    int count = count_from(keys, width, tried);
    if (count >= k) found = tried;
    if (count == k) break;
  }
  return found;
}

/* A threshold T with k sizes at or above it, if those equal to it are taken only until there are k. The upper halves
   of sizes decide first: twice as many of them fit in a vector. */
static u32 threshold(const u32 *sizes, int width, int k) {
  u16 upper[CHUNK], lower[CHUNK];
  for (int j = 0; j < width; ++j) upper[j] = (u16)(sizes[j] >> 15);
  u16 top = kth_of(upper, width, k);
  int above = top == 0xffff ? 0 : count_from(upper, width, (u16)(top + 1)), equal = 0;
  for (int j = 0; j < width; ++j)
    if (upper[j] == top) lower[equal++] = (u16)(sizes[j] & 0x7fffu);
  if (equal <= k - above) return (u32)top << 15;
  return (u32)top << 15 | kth_of(lower, equal, k - above);
}

static f32 sent_value(u32 code, f32 smallest, f32 step) {
  f32 size = smallest + ((f32)(code >> 1) + 0.5f) * step;
  size = size > LARGEST ? LARGEST : size;
  return code & 1 ? -size : size;
}

static void encode_chunk(const f32 *x, int width, u8 *out, f32 *residual, const i64 *arguments) {
  const struct layout *at = layout_of(arguments, width);
  u32 sizes[CHUNK], largest = 0, smallest = INFINITE;
  int index[CHUNK], bits = (int)arguments[0], k = (int)at->k, count = 0, over = 0;
  for (int j = 0; j < width; ++j) {
    sizes[j] = as_bits(x[j]) & 0x7fffffffu;
    largest = sizes[j] > largest ? sizes[j] : largest;
  }
  u32 least = k < width ? threshold(sizes, width, k) : 0;
  for (int j = 0; j < width; ++j) over += sizes[j] > least;
  int room = k - over;
  for (int first = 0; first < width; first += 8) {
    int last = first + 8 < width ? first + 8 : width, any = 0;
    for (int j = first; j < last; ++j) any |= sizes[j] >= least;
    if (!any) continue;
    for (int j = first; j < last; ++j) {
      if (sizes[j] < least || (sizes[j] == least && room-- <= 0)) continue;
      if (sizes[j] < TINY) continue;
      index[count++] = j;
      smallest = sizes[j] < smallest ? sizes[j] : smallest;
    }
  }
  f32 from = count ? as_float(smallest) : 0.0f, to = count ? as_float(largest) : 0.0f;
  int levels = 1 << (bits - 1);
  u32 step_bits = bf16_up((to - from) * (1.0f / (f32)levels));
  f32 step = as_float(step_bits << 16), inverse = step_bits ? 1.0f / step : 0.0f;
  memset(out, 0, at->bytes);
  store16(out, (u32)count);
  store16(out + 2, step_bits);
  memcpy(out + 4, &from, 4);
  out += 8;
  if (residual && residual != x) memcpy(residual, x, 4 * (size_t)width);
  i64 unary = k * at->low, codes = unary + at->unary;
  for (int i = 0; i < k; ++i) {
    u32 j = i < count ? (u32)index[i] : (u32)width - 1, code = 0;
    if (i < count) {
      int level = (int)((as_float(sizes[j]) - from) * inverse);
      code = (u32)(level < levels ? level : levels - 1) << 1 | as_bits(x[j]) >> 31;
      if (residual) residual[j] = x[j] - sent_value(code, from, step);
    }
    put(out, i * at->low, j & ((1u << at->low) - 1));
    put(out, unary + (j >> at->low) + i, 1);
    put(out, codes + i * bits, code);
  }
}

static void decode_chunk(const u8 *data, int width, f32 *out, int add, const i64 *arguments) {
  const struct layout *at = layout_of(arguments, width);
  int count = (int)load16(data), bits = (int)arguments[0], k = (int)at->k;
  count = count < k ? count : k;
  f32 step = as_float(load16(data + 2) << 16), from;
  memcpy(&from, data + 4, 4);
  data += 8;
  if (!add) memset(out, 0, 4 * (size_t)width);
  i64 place = k * at->low, codes = place + at->unary, end = codes;
  for (int i = 0; i < count && place < end; ++i, ++place) {
    while (place < end && !(data[place >> 3] >> (place & 7) & 1)) ++place;
    i64 j = (place - k * at->low - i) << at->low | get(data, i * at->low, (int)at->low);
    f32 value = sent_value(get(data, codes + (i64)i * bits, bits), from, step);
    if (j < width) out[j] = add ? out[j] + value : value;
  }
}

CODEC(offbeat_encode_topk, offbeat_decode_topk, CHUNK, layout_of(arguments, CHUNK)->bytes, encode_chunk, decode_chunk)
