/* Integer kernels: sums of products of bytes, requantized before they leave the registers.

   Tensors are bytes, channels last: byte b stands for the centred integer b - zero, where `zero` is the tensor's own. Sums are
   32 bits wide; that they fit is proved where the graph is lowered. What an accumulator becomes is said by `Epilogue`, in the words
   of the primitives requantize_real and requantize_fixed. Everything is exact, so the order of sums and the number of threads
   change nothing. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define VNNI 1
#else
#define VNNI 0
#endif
#if !VNNI && defined(__AVX2__)
#include <immintrin.h>
#define WORDS 1 /* sums of products of bytes that were widened to 16 bits */
#else
#define WORDS 0
#endif
#if VNNI && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX 1
#else
#define AMX 0
#endif

enum { SUM = 0, REAL = 1, FIXED = 2 };

typedef struct {
    int64_t mode;                    /* SUM: int32 accumulators are the result; REAL; FIXED */
    int64_t low, high;               /* limits of the centred integers */
    int64_t zero;                    /* of the result */
    int64_t limit;                   /* FIXED: of the intermediate, 2^(bits - 1) */
    int64_t residual_zero;
    const float *factor;             /* REAL, per channel */
    const int32_t *shift, *multiplier, *right_shift, *half, *before; /* FIXED: before is added to the sum, half to the product */
    const int32_t *residual_factor, *residual_shift; /* where there is a residual: what it is multiplied by, then shifted by */
} Epilogue;

#define EACH(NAME) NAME##_depth, NAME##_height, NAME##_width
#define Window \
    int64_t depth, height, width, EACH(out), EACH(kernel), EACH(stride), EACH(pad), EACH(dilation) /* of the input, the output, a window */

typedef struct {
    const uint8_t *input, *residual, *outside; /* outside: a pixel of zeros, which stands for the padding */
    const void *weight;
    const int32_t *bias;
    void *output;
    int64_t batch, channels;         /* of the input; channels are also the bytes of a pixel */
    int64_t out_channels, out_pixel; /* out_pixel: elements of a pixel of the output, and of the residual */
    int64_t groups, threads;
    int64_t fused; /* whether the taps of a row, which lie side by side, are summed as one */
    int64_t small; /* whether no byte of the input is above 127: a sum of two of its products with weights then fits in 16 bits */
    int64_t in_place; /* whether tiles read pixels where they lie: every run of the weight then fills whole tiles, with zeros */
    int64_t arranged, steps, runs; /* of a weight of AVX2: whether its steps are of bytes or of words, their number, and that of their runs */
    int64_t squeezed;              /* and whether the operands are copied without the fourth channel, which is only padding */
    Window;
    int64_t whole_depth, whole_height, whole_width; /* of the output and the residual, of which these pixels are written and read: */
    int64_t first_depth, first_height, first_width, step_depth, step_height, step_width; /* the first, and every step-th after it */
    Epilogue epilogue;
} Sum;

typedef struct {
    const void *input, *table;
    const uint8_t *other;
    void *output;
    int64_t batch, channels, zero, low, high, out_channels, threads;
    Window;
    float scale;
} Move;

int64_t fxq_has_dot_products(void) { return VNNI; }
int64_t fxq_has_sums_of_products(void) { return VNNI || WORDS; }

/* Whether the system lets this process use the tiles of AMX, which it has to ask for. */
int64_t fxq_has_tiles(void) {
#if AMX
    static int64_t permitted = -1;
    if (permitted < 0) permitted = syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
    return permitted;
#else
    return 0;
#endif
}

/* ---- from an accumulator to a byte ---- */

static inline int32_t nearest(float value) { /* half to even; |value| < 2^22 */
    union { float f; int32_t i; } u;
    u.f = value + 12582912.0f;
    return u.i - 0x4B400000;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#define INLINE static inline __attribute__((always_inline))

/* mode and adds are constants where these are inlined. */
INLINE int32_t requantized(const Epilogue *e, int mode, int32_t sum, int64_t c) {
    int32_t low = (int32_t)e->low, high = (int32_t)e->high, q;
    if (mode == REAL) {
        float v = (float)sum * e->factor[c];
        v = v < (float)low ? (float)low : v;
        v = v > (float)high ? (float)high : v;
        q = nearest(v);
    } else {
        int32_t limit = (int32_t)e->limit, v = (sum + e->before[c]) >> e->shift[c];
        v = v < -limit ? -limit : v;
        v = v > limit - 1 ? limit - 1 : v;
        q = (v * e->multiplier[c] + e->half[c]) >> e->right_shift[c];
        q = q < low ? low : q;
        q = q > high ? high : q;
    }
    return q + (int32_t)e->zero;
}

enum { TOGETHER = 64 }; /* channels: they are finished in an array of their own, since what is written there aliases no operand */

INLINE void finish_channels(const Epilogue *e, int mode, int adds, const int32_t *sums, int64_t channels, const uint8_t *residual, void *output, int64_t at) {
    for (int64_t begin = 0; begin < channels; begin += TOGETHER) {
        int64_t n = channels - begin < TOGETHER ? channels - begin : TOGETHER;
        int32_t total[TOGETHER];
        uint8_t bytes[TOGETHER];
        for (int64_t i = 0; i < n; i++) {
            int64_t c = begin + i;
            total[i] = sums[c];
            if (adds) total[i] += (((int32_t)residual[at + c] - (int32_t)e->residual_zero) * e->residual_factor[c]) >> e->residual_shift[c];
        }
        if (mode == SUM) {
            memcpy((int32_t *)output + at + begin, total, (size_t)n * sizeof *total);
            continue;
        }
        for (int64_t i = 0; i < n; i++) bytes[i] = (uint8_t)requantized(e, mode, total[i], begin + i);
        memcpy((uint8_t *)output + at + begin, bytes, (size_t)n);
    }
}

#if VNNI
typedef struct {
    __m512 factor;
    __m512i shift, multiplier, right_shift, half, before, residual_factor, residual_shift;
} Lanes; /* what an epilogue is for sixteen channels */

INLINE __mmask16 mask_of(int64_t channels) { return channels >= 16 ? 0xFFFF : (__mmask16)((1u << channels) - 1); }

INLINE Lanes lanes_of(const Epilogue *e, int mode, int adds, int64_t c, __mmask16 mask) {
    Lanes l;
    if (mode == REAL) l.factor = _mm512_maskz_loadu_ps(mask, e->factor + c);
    if (mode == FIXED) {
        l.shift = _mm512_maskz_loadu_epi32(mask, e->shift + c);
        l.multiplier = _mm512_maskz_loadu_epi32(mask, e->multiplier + c);
        l.right_shift = _mm512_maskz_loadu_epi32(mask, e->right_shift + c);
        l.half = _mm512_maskz_loadu_epi32(mask, e->half + c);
        l.before = _mm512_maskz_loadu_epi32(mask, e->before + c);
    }
    if (adds) {
        l.residual_factor = _mm512_maskz_loadu_epi32(mask, e->residual_factor + c);
        l.residual_shift = _mm512_maskz_loadu_epi32(mask, e->residual_shift + c);
    }
    return l;
}

/* mode, adds and full are constants where this is inlined. */
INLINE void finish(const Epilogue *e, const Lanes *l, int mode, int adds, int full, __m512i sum, __mmask16 mask, const uint8_t *residual,
                   void *output, int64_t at) {
    if (adds) {
        __m128i bytes = full ? _mm_loadu_si128((const __m128i *)(residual + at)) : _mm_maskz_loadu_epi8(mask, residual + at);
        __m512i r = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32((int32_t)e->residual_zero));
        sum = _mm512_add_epi32(sum, _mm512_srav_epi32(_mm512_mullo_epi32(r, l->residual_factor), l->residual_shift));
    }
    if (mode == SUM) {
        _mm512_mask_storeu_epi32((int32_t *)output + at, mask, sum);
        return;
    }
    __m512i q;
    if (mode == REAL) {
        __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), l->factor);
        v = _mm512_max_ps(v, _mm512_set1_ps((float)e->low));
        v = _mm512_min_ps(v, _mm512_set1_ps((float)e->high));
        q = _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
        __m512i v = _mm512_srav_epi32(_mm512_add_epi32(sum, l->before), l->shift);
        v = _mm512_max_epi32(v, _mm512_set1_epi32((int32_t)-e->limit));
        v = _mm512_min_epi32(v, _mm512_set1_epi32((int32_t)(e->limit - 1)));
        v = _mm512_madd_epi16(v, l->multiplier); /* both have 16 bits, and the upper half of the multiplier is 0 */
        v = _mm512_srav_epi32(_mm512_add_epi32(v, l->half), l->right_shift);
        v = _mm512_max_epi32(v, _mm512_set1_epi32((int32_t)e->low));
        q = _mm512_min_epi32(v, _mm512_set1_epi32((int32_t)e->high));
    }
    __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32((int32_t)e->zero)));
    if (full) _mm_storeu_si128((__m128i *)((uint8_t *)output + at), bytes);
    else _mm_mask_storeu_epi8((uint8_t *)output + at, mask, bytes);
}

#endif

#if WORDS
typedef struct {
    __m256 factor;
    __m256i shift, multiplier, right_shift, half, before, residual_factor, residual_shift;
} Lanes; /* what an epilogue is for eight channels */

/* Numbers of eight channels: of four from `c` on, and of four more `apart` channels further on. Arrays are padded to whole vectors. */
INLINE __m256i eight_of(const void *values, int64_t c, int64_t apart) {
    const int32_t *at = (const int32_t *)values + c;
    if (apart == 4) return _mm256_loadu_si256((const __m256i *)at);
    return _mm256_loadu2_m128i((const __m128i *)(at + apart), (const __m128i *)at);
}

INLINE Lanes lanes_of(const Epilogue *e, int mode, int adds, int64_t c, int64_t apart) {
    Lanes l;
    if (mode == REAL) l.factor = _mm256_castsi256_ps(eight_of(e->factor, c, apart));
    if (mode == FIXED) {
        l.shift = eight_of(e->shift, c, apart), l.multiplier = eight_of(e->multiplier, c, apart);
        l.right_shift = eight_of(e->right_shift, c, apart), l.half = eight_of(e->half, c, apart), l.before = eight_of(e->before, c, apart);
    }
    if (adds) l.residual_factor = eight_of(e->residual_factor, c, apart), l.residual_shift = eight_of(e->residual_shift, c, apart);
    return l;
}

/* The integers that eight sums become, before their limits; of an accumulator, the sums. mode and adds are constants. */
INLINE __m256i finished(const Epilogue *e, const Lanes *l, int mode, int adds, __m256i sum, __m128i residual) {
    if (adds) {
        __m256i r = _mm256_sub_epi32(_mm256_cvtepu8_epi32(residual), _mm256_set1_epi32((int32_t)e->residual_zero));
        sum = _mm256_add_epi32(sum, _mm256_srav_epi32(_mm256_mullo_epi32(r, l->residual_factor), l->residual_shift));
    }
    if (mode == SUM) return sum;
    if (mode == REAL) { /* beyond 2^31 a positive number would become a negative integer */
        __m256 v = _mm256_min_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), l->factor), _mm256_set1_ps(32767.0f));
        return _mm256_cvtps_epi32(v);
    }
    __m256i v = _mm256_srav_epi32(_mm256_add_epi32(sum, l->before), l->shift);
    v = _mm256_max_epi32(v, _mm256_set1_epi32((int32_t)-e->limit));
    v = _mm256_min_epi32(v, _mm256_set1_epi32((int32_t)(e->limit - 1)));
    v = _mm256_madd_epi16(v, l->multiplier); /* both have 16 bits, and the upper half of the multiplier is 0 */
    return _mm256_srav_epi32(_mm256_add_epi32(v, l->half), l->right_shift);
}

/* Sixteen integers within their limits, with the zero added, in 16 bits: in each half of the vector, four of `first`, then of `second`. */
INLINE __m256i limited(const Epilogue *e, __m256i first, __m256i second) {
    __m256i words = _mm256_packs_epi32(first, second); /* saturates, beyond the limits of bytes */
    words = _mm256_max_epi16(words, _mm256_set1_epi16((int16_t)e->low));
    words = _mm256_min_epi16(words, _mm256_set1_epi16((int16_t)e->high));
    return _mm256_add_epi16(words, _mm256_set1_epi16((int16_t)e->zero));
}

INLINE __m128i residual_of(const uint8_t *residual, int64_t channels) {
    int64_t bytes = 0;
    if (channels >= 8) memcpy(&bytes, residual, 8);
    else memcpy(&bytes, residual, (size_t)channels);
    return _mm_cvtsi64_si128(bytes);
}

/* Store what `finished` gives of eight channels, or of fewer, of two pixels, or of the first. */
INLINE void store_pair(const Epilogue *e, int mode, int64_t channels, void *output, const int64_t *places, const __m256i *sums, int two) {
    if (mode == SUM) {
        for (int i = 0; i < 1 + two; i++) memcpy((int32_t *)output + places[i], sums + i, (size_t)least(channels, 8) * 4);
        return;
    }
    __m256i words = limited(e, sums[0], sums[two]), bytes = _mm256_packus_epi16(words, words);
    __m128i both = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5)));
    int64_t eights[2] = {_mm_cvtsi128_si64(both), _mm_extract_epi64(both, 1)};
    for (int i = 0; i < 1 + two; i++) {
        uint8_t *to = (uint8_t *)output + places[i];
        if (channels >= 8) memcpy(to, eights + i, 8);
        else memcpy(to, eights + i, (size_t)channels);
    }
}
#endif

/* BODY(mode, adds) with constants, for what the structure says. */
#define FOR_EACH_EPILOGUE(s, BODY)                                                                                                     \
    switch ((s)->epilogue.mode * 2 + ((s)->residual != NULL)) {                                                                        \
        case 2 * SUM: BODY(SUM, 0); break;                                                                                             \
        case 2 * SUM + 1: BODY(SUM, 1); break;                                                                                         \
        case 2 * REAL: BODY(REAL, 0); break;                                                                                           \
        case 2 * REAL + 1: BODY(REAL, 1); break;                                                                                       \
        case 2 * FIXED: BODY(FIXED, 0); break;                                                                                         \
        default: BODY(FIXED, 1); break;                                                                                                \
    }

static void finish_row(const Sum *s, const int32_t *sums, int64_t at) {
    int64_t channels = s->out_channels;
#if VNNI
#define ROW(MODE, ADDS)                                                                                                                \
    for (int64_t c = 0; c < channels; c += 16) {                                                                                       \
        __mmask16 mask = mask_of(channels - c);                                                                                        \
        Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, c, mask);                                                                     \
        finish(&s->epilogue, &lanes, MODE, ADDS, 0, _mm512_maskz_loadu_epi32(mask, sums + c), mask, s->residual, s->output, at + c);   \
    }
    FOR_EACH_EPILOGUE(s, ROW)
#elif WORDS
#define ROW(MODE, ADDS)                                                                                                                \
    for (int64_t c = 0; c < channels; c += 8) {                                                                                        \
        const int64_t place = at + c, left = channels - c;                                                                             \
        const Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, c, 4);                                                                  \
        int32_t own[8];                                                                                                                \
        memcpy(own, sums + c, (size_t)least(left, 8) * sizeof *own);                                                                   \
        const __m128i residual = ADDS ? residual_of(s->residual + place, left) : _mm_setzero_si128();                                  \
        const __m256i v = finished(&s->epilogue, &lanes, MODE, ADDS, _mm256_loadu_si256((const __m256i *)own), residual);              \
        store_pair(&s->epilogue, MODE, left, s->output, &place, &v, 0);                                                                \
    }
    FOR_EACH_EPILOGUE(s, ROW)
#else
    const Epilogue own = s->epilogue;
#define ROW(MODE, ADDS) finish_channels(&own, MODE, ADDS, sums, channels, s->residual, s->output, at)
    FOR_EACH_EPILOGUE(s, ROW)
#endif
}

/* Rows of accumulators, each of `out_channels`, as bytes. */
void fxq_finish(const Sum *s) {
    int64_t rows = s->batch, channels = s->out_channels;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t row = 0; row < rows; row++)
        finish_row(s, (const int32_t *)s->input + row * channels, row * s->out_pixel);
}

/* ---- where a sum reads ---- */

static int64_t taps_of(const Sum *s) { return s->kernel_depth * s->kernel_height * (s->fused ? 1 : s->kernel_width); }

/* Of what find_pixels needs: the table, corners, places, and copies of rows that lie partly outside. */
static size_t bytes_of_table(const Sum *s, int64_t stride) {
    int64_t taps = taps_of(s), copies = s->fused ? taps * stride * s->kernel_width * s->channels : 0;
    return (size_t)((taps + 2) * stride) * sizeof(uint64_t) + (size_t)copies + 64; /* vectors read beyond the last copy */
}

/* Of each pixel of a table, the element of the output at which its first channel is written. */
static inline const int64_t *places_of(const Sum *s, const uint8_t *const *table, int64_t stride) {
    return (const int64_t *)(table + (taps_of(s) + 1) * stride);
}

/* For each tap and each of `count` output pixels from `first` on, the pixel of the input; [tap][stride]. Fused taps are rows. */
static void find_pixels(const Sum *s, int64_t first, int64_t count, int64_t stride, const uint8_t **table) {
    int64_t taps = taps_of(s), row_bytes = s->kernel_width * s->channels, rows = s->kernel_depth * s->kernel_height;
    int64_t x = first % s->out_width, y = first / s->out_width % s->out_height;
    int64_t z = first / s->out_width / s->out_height % s->out_depth, image = first / s->out_width / s->out_height / s->out_depth;
    int64_t far = (s->kernel_depth - 1) * s->dilation_depth, deep = (s->kernel_height - 1) * s->dilation_height;
    int64_t wide = (s->kernel_width - 1) * s->dilation_width;
    const uint8_t **corners = table + taps * stride; /* the first tap's; null where some tap is outside */
    int64_t *places = (int64_t *)places_of(s, table, stride);
    uint8_t *copies = (uint8_t *)(places + stride);
    for (int64_t m = 0; m < stride; m++) {
        int64_t front = z * s->stride_depth - s->pad_depth, top = y * s->stride_height - s->pad_height, left = x * s->stride_width - s->pad_width;
        const uint8_t *base = s->input + image * s->depth * s->height * s->width * s->channels;
        int inside = m < count && front >= 0 && top >= 0 && left >= 0 && front + far < s->depth && top + deep < s->height && left + wide < s->width;
        corners[m] = inside ? base + ((front * s->height + top) * s->width + left) * s->channels : NULL;
        int64_t plane = image * s->whole_depth + s->first_depth + z * s->step_depth;
        int64_t line = plane * s->whole_height + s->first_height + y * s->step_height;
        places[m] = (line * s->whole_width + s->first_width + x * s->step_width) * s->out_pixel;
        if (!inside) /* what is computed for pixels from `count` on is not stored */
            for (int64_t i = 0; i < rows; i++) {
                int64_t at = front + i / s->kernel_height * s->dilation_depth, row = top + i % s->kernel_height * s->dilation_height;
                uint8_t *copy = copies + (i * stride + m) * row_bytes;
                if (s->fused) table[i * stride + m] = copy;
                for (int64_t j = 0; j < s->kernel_width; j++) {
                    int64_t column = left + j * s->dilation_width;
                    int here = m < count && at >= 0 && at < s->depth && row >= 0 && row < s->height && column >= 0 && column < s->width;
                    const uint8_t *pixel = here ? base + ((at * s->height + row) * s->width + column) * s->channels : s->outside;
                    if (s->fused) memcpy(copy + j * s->channels, pixel, (size_t)s->channels);
                    else table[(i * s->kernel_width + j) * stride + m] = pixel;
                }
            }
        if (++x == s->out_width) {
            x = 0;
            if (++y == s->out_height) {
                y = 0;
                if (++z == s->out_depth) z = 0, image++;
            }
        }
    }
    int64_t across = taps / rows;
    for (int64_t t = 0; t < taps; t++) {
        int64_t i = t / across, line = i / s->kernel_height * s->dilation_depth * s->height + i % s->kernel_height * s->dilation_height;
        int64_t offset = (line * s->width + t % across * s->dilation_width) * s->channels;
        const uint8_t **row = table + t * stride;
        for (int64_t m = 0; m < stride; m++) row[m] = corners[m] ? corners[m] + offset : row[m];
    }
}

#if VNNI || WORDS
/* A sum of one pixel for each of its rows, as that of a linear layer. */
static void set_one_pixel(Sum *s) {
    s->depth = s->height = s->width = s->out_depth = s->out_height = s->out_width = s->kernel_depth = s->kernel_height = s->kernel_width = 1;
    s->stride_depth = s->stride_height = s->stride_width = s->dilation_depth = s->dilation_height = s->dilation_width = s->groups = 1;
    s->whole_depth = s->whole_height = s->whole_width = s->step_depth = s->step_height = s->step_width = 1;
}
#endif

/* ---- sums of products over channels ---- */

#if VNNI
/* `PIXELS` output pixels by `BLOCKS` times sixteen output channels. The weight of a block is [tap][channels / 4][16][4]. */
#define TILE(NAME, PIXELS, BLOCKS)                                                                                                     \
    static void NAME(const Sum *s, const uint8_t *const *table, int64_t stride, int64_t offset, const int8_t *weight,                  \
                     int64_t block_bytes, int64_t quads, int64_t channel, int64_t channels, int64_t count) {                           \
        enum { TILE_PIXELS = PIXELS, TILE_BLOCKS = BLOCKS };                                                                           \
        __m512i sum[PIXELS][BLOCKS];                                                                                                   \
        int64_t taps = taps_of(s);                                                                                                     \
        const int64_t *places = places_of(s, table, stride);                                                                           \
        _Pragma("GCC unroll 4") for (int b = 0; b < BLOCKS; b++) {                                                                     \
            int64_t left = channels - 16 * b;                                                                                          \
            __mmask16 mask = left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);                                                      \
            __m512i bias = _mm512_maskz_loadu_epi32(mask, s->bias + channel + 16 * b);                                                 \
            _Pragma("GCC unroll 16") for (int m = 0; m < PIXELS; m++) sum[m][b] = bias;                                                \
        }                                                                                                                              \
        for (int64_t t = 0; t < taps; t++) {                                                                                           \
            const uint8_t *pixel[PIXELS];                                                                                              \
            const int8_t *w = weight + t * quads * 64;                                                                                 \
            _Pragma("GCC unroll 16") for (int m = 0; m < PIXELS; m++) pixel[m] = table[t * stride + m] + offset;                       \
            for (int64_t k = 0; k < quads; k++, w += 64) {                                                                             \
                __m512i factors[BLOCKS];                                                                                               \
                _Pragma("GCC unroll 4") for (int b = 0; b < BLOCKS; b++) factors[b] = _mm512_loadu_si512(w + b * block_bytes);         \
                _Pragma("GCC unroll 16") for (int m = 0; m < PIXELS; m++) {                                                            \
                    int32_t word;                                                                                                      \
                    memcpy(&word, pixel[m] + 4 * k, 4);                                                                                \
                    __m512i x = _mm512_set1_epi32(word);                                                                               \
                    _Pragma("GCC unroll 4") for (int b = 0; b < BLOCKS; b++) sum[m][b] = _mm512_dpbusd_epi32(sum[m][b], x, factors[b]); \
                }                                                                                                                      \
            }                                                                                                                          \
        }                                                                                                                              \
        FOR_EACH_EPILOGUE(s, STORE)                                                                                                    \
    }
#define STORE(MODE, ADDS)                                                                                                              \
    if (channels == 16 * TILE_BLOCKS && count == TILE_PIXELS) { STORE_TILE(MODE, ADDS, 1) } else { STORE_TILE(MODE, ADDS, 0) }
#define STORE_TILE(MODE, ADDS, FULL)                                                                                                   \
    _Pragma("GCC unroll 4") for (int b = 0; b < TILE_BLOCKS; b++) {                                                                         \
        __mmask16 mask = mask_of(channels - 16 * b);                                                                                   \
        Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, channel + 16 * b, mask);                                                      \
        _Pragma("GCC unroll 16") for (int m = 0; m < TILE_PIXELS; m++) if (FULL || m < count)                                               \
            finish(&s->epilogue, &lanes, MODE, ADDS, FULL, sum[m][b], mask, s->residual, s->output,                                    \
                   places[m] + channel + 16 * b);                                                                                      \
    }

TILE(tile_1, 12, 1)
TILE(tile_2, 12, 2)
TILE(tile_3, 8, 3)
TILE(tile_4, 6, 4)
#define CHUNK 48 /* pixels; a whole number of tiles of every kind */

static void chunk_of(const Sum *s, int64_t group, int64_t count, int64_t begin, int64_t end, const uint8_t **table) {
    int64_t inner = s->channels / s->groups, outer = s->out_channels / s->groups, taps = taps_of(s);
    int64_t quads = inner / 4 * (s->fused ? s->kernel_width : 1), block_bytes = taps * quads * 64;
    const int8_t *weight = (const int8_t *)s->weight + group * ((outer + 15) / 16) * block_bytes;
    for (int64_t block = begin; block < end;) {
        int64_t left = end - block, blocks = left >= 4 && left != 5 ? 4 : left >= 3 ? 3 : left;
        int64_t pixels = blocks == 4 ? 6 : blocks == 3 ? 8 : 12, channels = least(outer - 16 * block, 16 * blocks);
        for (int64_t m = 0; m < count; m += pixels) {
            void (*tile)(const Sum *, const uint8_t *const *, int64_t, int64_t, const int8_t *, int64_t, int64_t, int64_t, int64_t,
                         int64_t) = blocks == 4 ? tile_4 : blocks == 3 ? tile_3 : blocks == 2 ? tile_2 : tile_1;
            tile(s, table + m, CHUNK, group * inner, weight + block * block_bytes, block_bytes, quads, group * outer + 16 * block, channels,
                 least(pixels, count - m));
        }
        block += blocks;
    }
}
#endif

#if AMX
enum { ROWS = 16, DEEP = 64, HELD = 1 << 19, WIDE = 512 }; /* at most HELD bytes of operands, and about WIDE pixels, are computed at a time */

/* The number of bytes of one run: taps of a pixel that lie side by side in memory. */
static int64_t run_of(const Sum *s) { return s->channels / s->groups * (s->fused ? s->kernel_width : 1); }

static int64_t upward(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

/* Whether each pixel of the output reads the same pixel of the input alone. Then all pixels of a batch are one line. */
static int64_t is_pointwise(const Sum *s) {
    return s->kernel_depth * s->kernel_height * s->kernel_width * s->stride_depth * s->stride_height * s->stride_width == 1 &&
           !(s->pad_depth | s->pad_height | s->pad_width) && s->depth == s->out_depth && s->height == s->out_height && s->width == s->out_width;
}

static int64_t is_flat(const Sum *s) { return s->stride_height == 1 && s->stride_width == 1; } /* tiles run on from one line to the next */

static int64_t reach(int64_t out, int64_t stride, int64_t kernel, int64_t dilation) { return (out - 1) * stride + (kernel - 1) * dilation + 1; }

/* The number of pixels that tiles compute for `lines` lines of `width` pixels. Pixels between two lines are computed, but not stored. */
static int64_t computed(const Sum *s, int64_t lines, int64_t width) {
    return is_flat(s) ? upward((lines - 1) * reach(width, 1, s->kernel_width, s->dilation_width) + width, ROWS) : lines * upward(width, ROWS);
}

#endif

/* Whether tiles read a sum's operand in place. At least half of the pixels that they then compute have to be stored. */
int64_t fxq_reads_in_place(const Sum *s) {
#if AMX
    int64_t pixels = s->out_depth * s->out_height * s->out_width;
    if (!fxq_has_tiles() || s->groups > 1) return 0;
    if (is_pointwise(s)) return s->channels >= DEEP / 2 && (pixels >= ROWS || s->channels % DEEP == 0);
    if (taps_of(s) == 1 && !s->fused) return 0;
    return taps_of(s) * run_of(s) >= DEEP / 2 && pixels >= ROWS &&
           2 * pixels >= s->out_depth * computed(s, s->out_height, s->out_width);
#else
    (void)s;
    return 0;
#endif
}

#if AMX
/* Tiles of 16 rows: pixels by 64 bytes of their operands, times 64 bytes by 16 output channels, are sums of 16 pixels by 16 channels.
   The pixels of a tile lie `pitch` bytes apart, the first one at a base; the operands of a pixel are 64 bytes at each of `steps`. */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) Tiles;

typedef struct {
    const uint8_t **bases; /* of each 16 pixels */
    int64_t *places;       /* of each pixel, the element of the output at which its first channel is written; -1 where it is not stored */
    int64_t *steps, pitch, tiles, deep; /* numbers of bases and steps */
    uint8_t *bytes;        /* copies of operands */
} Operands;

static int64_t depth_of(const Sum *s) { return taps_of(s) * run_of(s); }

/* The bytes from one collected pixel to the next, which are not a multiple of a page. */
static int64_t pitch_of(const Sum *s) {
    int64_t pitch = upward(depth_of(s), DEEP);
    return pitch % 512 ? pitch : pitch + DEEP;
}

/* The pixels that are computed together, if tiles are of use: 0 where a product is too small, or the system has no tiles. */
static int64_t tiled_pixels(const Sum *s) {
    if (!fxq_has_tiles() || depth_of(s) < DEEP || s->batch * s->out_depth * s->out_height * s->out_width < ROWS / 2) return 0;
    int64_t pixels = HELD / pitch_of(s) / (2 * ROWS) * (2 * ROWS);
    return pixels < 2 * ROWS ? 2 * ROWS : least(pixels, 256);
}

static void begin_tiles(void) {
    Tiles tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = ROWS;
    _tile_loadconfig(&tiles);
}

/* The operands of `count` pixels, each a row of `pitch` bytes, with zeros in the rest of the last tile. */
static void collect(const Sum *s, const uint8_t *const *table, int64_t stride, int64_t offset, int64_t count, Operands *to) {
    int64_t taps = taps_of(s), depth = depth_of(s), bytes = depth / taps;
    for (int64_t m = 0; m < count; m++) {
        uint8_t *row = to->bytes + m * to->pitch;
        if (depth % DEEP) _mm512_store_si512(row + depth / DEEP * DEEP, _mm512_setzero_si512());
        for (int64_t t = 0; t < taps; t++, row += bytes) {
            const uint8_t *pixel = table[t * stride + m] + offset;
            int64_t i = 0;
            for (; i + DEEP <= bytes; i += DEEP) _mm512_storeu_si512(row + i, _mm512_loadu_si512(pixel + i));
            if (i < bytes) {
                __mmask64 mask = ~0ull >> (DEEP - (bytes - i));
                _mm512_mask_storeu_epi8(row + i, mask, _mm512_maskz_loadu_epi8(mask, pixel + i));
            }
        }
    }
    const int64_t *places = places_of(s, table, stride);
    for (int64_t m = 0; m < upward(count, ROWS); m++) to->places[m] = m < count ? places[m] : -1;
    to->tiles = (count + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < to->tiles; i++) to->bases[i] = to->bytes + i * ROWS * to->pitch;
}

/* The division of a sum into chunks, where its operand is read in place: `planes` planes of `lines` lines of `width` pixels each. */
typedef struct {
    int64_t planes, lines, width, whole_lines, whole_width, copied; /* whole: of a plane; copied: bytes of a plane's operands */
    int64_t parts, columns, chunks; /* parts of a plane's lines, of a line's pixels, and all chunks */
} Division;

static int64_t bytes_of_plane(const Sum *s, int64_t lines, int64_t width) {
    int64_t high = reach(lines, s->stride_height, s->kernel_height, s->dilation_height);
    return s->kernel_depth * high * reach(width, s->stride_width, s->kernel_width, s->dilation_width) * s->channels;
}

static Division divided(const Sum *s) {
    Division d = {.planes = s->batch * s->out_depth, .whole_lines = s->out_height, .whole_width = s->out_width};
    int64_t all = d.planes, most = least(WIDE, HELD / s->channels / 2);
    if (is_pointwise(s)) all = d.planes = d.whole_lines = 1, d.whole_width = s->batch * s->out_depth * s->out_height * s->out_width;
    d.columns = d.whole_width > 2 * most ? (d.whole_width + most - 1) / most : 1;
    d.width = upward((d.whole_width + d.columns - 1) / d.columns, d.columns > 1 ? ROWS : 1);
    d.lines = least(d.whole_lines, most / d.width + 1);
    while (d.lines > 1 && bytes_of_plane(s, d.lines, d.width) > HELD) d.lines--;
    d.parts = (d.whole_lines + d.lines - 1) / d.lines;
    d.lines = (d.whole_lines + d.parts - 1) / d.parts;
    d.copied = bytes_of_plane(s, d.lines, d.width);
    d.planes = d.parts * d.columns > 1 ? 1 : least(all, 1 + least(most / (d.lines * d.width), HELD / d.copied));
    d.chunks = (all + d.planes - 1) / d.planes * d.parts * d.columns;
    return d;
}

/* Copy the pixels of the input that `lines` lines of `width` pixels of the output read, from `line` and `column` on, with their padding. */
static void copy_plane(const Sum *s, int64_t plane, int64_t line, int64_t column, int64_t lines, int64_t width, uint8_t *to) {
    int64_t image = plane / s->out_depth, left = column * s->stride_width - s->pad_width;
    int64_t high = reach(lines, s->stride_height, s->kernel_height, s->dilation_height), pixel = s->channels;
    int64_t wide = reach(width, s->stride_width, s->kernel_width, s->dilation_width);
    int64_t before = least(left < 0 ? -left : 0, wide), inside = least(s->width - left - before, wide - before);
    if (inside < 0) inside = 0;
    for (int64_t i = 0; i < s->kernel_depth * high; i++, to += wide * pixel) {
        int64_t z = plane % s->out_depth * s->stride_depth - s->pad_depth + i / high * s->dilation_depth;
        int64_t y = line * s->stride_height - s->pad_height + i % high;
        int64_t here = z >= 0 && z < s->depth && y >= 0 && y < s->height ? inside : 0;
        const uint8_t *from = s->input + (((image * s->depth + z) * s->height + y) * s->width + left + before) * pixel;
        memset(to, *s->outside, (size_t)((here ? before : wide) * pixel));
        if (!here) continue;
        memcpy(to + before * pixel, from, (size_t)(here * pixel));
        memset(to + (before + here) * pixel, *s->outside, (size_t)((wide - before - here) * pixel));
    }
}

/* Write the bases, places and steps of a chunk, and copy its operands where they have padding or end the input. */
static void find_operands(const Sum *s, const Division *d, int64_t chunk, Operands *to) {
    int64_t column = chunk % d->columns * d->width, line = chunk / d->columns % d->parts * d->lines, pointwise = is_pointwise(s);
    int64_t first = chunk / d->columns / d->parts * d->planes, last = pointwise ? 1 : least(first + d->planes, s->batch * s->out_depth);
    int64_t width = least(d->width, d->whole_width - column), lines = least(d->lines, d->whole_lines - line);
    int64_t high = reach(lines, s->stride_height, s->kernel_height, s->dilation_height);
    int64_t wide = reach(width, s->stride_width, s->kernel_width, s->dilation_width), flat = is_flat(s), period = flat ? wide : upward(width, ROWS);
    int64_t across = s->fused ? 1 : s->kernel_width, deep = (run_of(s) + DEEP - 1) / DEEP;
    to->pitch = s->stride_width * s->channels;
    to->deep = to->tiles = 0;
    for (int64_t t = 0; t < taps_of(s); t++)
        for (int64_t i = 0; i < deep; i++) {
            int64_t row = t / across / s->kernel_height * high + t / across % s->kernel_height * s->dilation_height;
            to->steps[to->deep++] = (row * wide + t % across * s->dilation_width) * s->channels + i * DEEP;
        }
    for (int64_t plane = first; plane < last; plane++) {
        const uint8_t *base = s->input + column * s->channels;
        if (pointwise && column + width == d->whole_width) { /* what lies after the operand is not read */
            memcpy(to->bytes, base, (size_t)(width * s->channels));
            base = to->bytes;
        } else if (!pointwise) {
            uint8_t *copy = to->bytes + (plane - first) * bytes_of_plane(s, lines, width);
            copy_plane(s, plane, line, column, lines, width, copy);
            base = copy;
        }
        int64_t count = flat ? upward((lines - 1) * wide + width, ROWS) : lines * period, *places = to->places + to->tiles * ROWS;
        for (int64_t m = 0; m < count; m += ROWS)
            to->bases[to->tiles++] = base + (flat ? m : m / period * s->stride_height * wide + m % period * s->stride_width) * s->channels;
        for (int64_t m = 0; m < count; m++) places[m] = -1;
        int64_t x = column, y = line, z = plane % s->out_depth, image = plane / s->out_depth;
        if (pointwise) {
            z = x / s->out_width / s->out_height, y = x / s->out_width % s->out_height, x %= s->out_width;
            image = z / s->out_depth, z %= s->out_depth;
        }
        for (int64_t i = 0; i < lines; i++, y++, x = column, places += period)
            for (int64_t j = 0; j < width; j++, x++) {
                if (x == s->out_width) {
                    x = 0;
                    if (++y == s->out_height) {
                        y = 0;
                        if (++z == s->out_depth) z = 0, image++;
                    }
                }
                int64_t deepest = image * s->whole_depth + s->first_depth + z * s->step_depth;
                int64_t highest = deepest * s->whole_height + s->first_height + y * s->step_height;
                places[j] = (highest * s->whole_width + s->first_width + x * s->step_width) * s->out_pixel;
            }
    }
}

#define TILED(MODE, ADDS)                                                                                                              \
    if (end - channel >= 16 * wide) { TILED_OF(MODE, ADDS, 1) } else { TILED_OF(MODE, ADDS, 0) }
#define TILED_OF(MODE, ADDS, FULL)                                                                                                     \
    for (int b = 0; b < wide; b++) {                                                                                                   \
        int64_t c = channel + 16 * b;                                                                                                  \
        __mmask16 mask = mask_of(end - c);                                                                                             \
        Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, c, mask);                                                                     \
        __m512i bias = _mm512_maskz_loadu_epi32(mask, s->bias + c);                                                                    \
        for (int64_t m = 0; m < here; m++)                                                                                             \
            if (places[m] >= 0)                                                                                                        \
                finish(&s->epilogue, &lanes, MODE, ADDS, FULL,                                                                         \
                       _mm512_add_epi32(bias, _mm512_load_si512(sums[2 * (m / ROWS) + b][m % ROWS])), mask, s->residual, s->output,    \
                       places[m] + c);                                                                                                 \
    }

/* 2 × 2 tiles of sums at a time. Sums of tiles wrap as those of VNNI do. */
static void tiles_of(const Sum *s, int64_t group, const Operands *o, int64_t begin, int64_t end_block) {
    int64_t outer = s->out_channels / s->groups, end = (group + 1) * outer, pitch = o->pitch;
    int64_t block_bytes = (s->in_place ? o->deep * DEEP : depth_of(s)) * ROWS;
    const int8_t *weight = (const int8_t *)s->weight + group * ((outer + 15) / 16) * block_bytes;
    _Alignas(64) int32_t sums[4][ROWS][16];
    for (int64_t block = begin; block < end_block; block += 2) {
        int wide = block + 1 < end_block ? 2 : 1;
        int64_t channel = group * outer + 16 * block;
        for (int64_t tile = 0; tile < o->tiles; tile += 2) {
            const int8_t *w = weight + block * block_bytes;
            const int64_t *places = o->places + tile * ROWS, here = tile + 1 < o->tiles ? 2 * ROWS : ROWS;
            const uint8_t *first = o->bases[tile], *second = here > ROWS ? o->bases[tile + 1] : NULL;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < o->deep; k++, w += DEEP * ROWS) {
                _tile_loadd(4, first + o->steps[k], pitch);
                _tile_loadd(6, w, 64);
                _tile_dpbusd(0, 4, 6);
                if (wide == 2) {
                    _tile_loadd(7, w + block_bytes, 64);
                    _tile_dpbusd(1, 4, 7);
                }
                if (second) {
                    _tile_loadd(5, second + o->steps[k], pitch);
                    _tile_dpbusd(2, 5, 6);
                    if (wide == 2) _tile_dpbusd(3, 5, 7);
                }
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            FOR_EACH_EPILOGUE(s, TILED)
        }
    }
}
#endif

#if WORDS
/* AVX2 multiplies bytes of an operand by those of a weight in pairs, and adds the two products in 16 bits, where they may not fit
   (maddubs). That they do is a property of the weight, so it is proved where the weight is packed, by `fxq_arrange`:

   A step is four bytes of a pixel times a quad of weights of each of eight output channels. The two products of a pair, and those of
   several steps, a run, are added in 16 bits; then the run's two sums of a channel are widened to 32 bits and added to its total. Bytes
   are at most 255 (127 if `small`), so a run is exact where neither the positive weights that meet in 16 bits nor the negative ones have
   a sum of magnitudes above 128 (258). Order is free: steps that fit together make a run. A step that alone does not fit becomes two,
   which share its weights. Where so many are split that it does not pay, all bytes of a layer are widened to 16 bits: words.

   Where the bytes of an operand lie around 128, as those of int8 do, there is another way: `moved`. The weights become the bytes, by 128
   more than they are, and the operand the signed factor, by 128 less. A step is then exact if no pair of the operand's has positive or
   negative numbers with a sum of magnitudes above 128, whatever the weights are. Few pairs have; these are found where the operand is
   copied, and what is too much of them is multiplied apart. What is added to the weights adds 128 times the sum of the operand. */

enum { BYTES = 1, WORDED = 2, TRANSFORMED = 3, MOVED = 4 }; /* what the steps of an arranged weight multiply: see also `transform_weight` */
enum { CHANNELS = 8, QUAD = 4, STEP = CHANNELS * QUAD, SUMS = STEP / 2 }; /* output channels, bytes, products and sums in 16 bits of a step */
enum { LONGEST = 4 };                           /* steps of a run */
enum { NEAR = 32, SPARED = 5 };                 /* from 128, of the zero of a moved operand; instructions of a moved step, with what is apart */
enum { AS_ONE = 8 };                            /* pixels side by side that are filtered as one, at most */
enum { CONSTANTS = 9, SLACK = 64 };             /* of each channel: the bias and those of an epilogue; and what is read after the last one */
enum { FILTERS = 32 };                          /* channels of a block of filters, whose steps are two taps of each of them */
#ifdef __AVXVNNI__
enum { SIDE = 12, LOOKED = 1, EXACT = 1 };      /* pixels side by side; steps that are tried for a run; whether every step is exact, alone */
#else
enum { SIDE = 8, LOOKED = 24, EXACT = 0 };
#endif

typedef struct {
    int32_t first, runs[LONGEST]; /* the first step; the numbers of runs of one step, of two, ... The longest come first */
} Block; /* of output channels */

/* An arranged weight: the blocks, the offset of the bytes of each step in a pixel's operands, and each step's weights. */
typedef struct {
    Block *blocks;
    int32_t *offsets;
    int8_t *weights;
    int64_t count, most; /* numbers of blocks and, at most, of steps */
} Arranged;

static int64_t rounded(int64_t size) { return (size + 63) / 64 * 64; }

/* The quads of a packed weight for each output channel, and those of its operands as they are copied. */
static int64_t packed_quads(const Sum *s) { return taps_of(s) * (s->channels / s->groups) / QUAD * (s->fused ? s->kernel_width : 1); }

static int64_t quads_of(const Sum *s) { return s->squeezed ? (packed_quads(s) * (QUAD - 1) + QUAD - 1) / QUAD : packed_quads(s); }

static int64_t blocks_of_group(const Sum *s) { return (s->out_channels / s->groups + CHANNELS - 1) / CHANNELS; }

enum { POSITIONS = 16 };

/* Whether a sum is of windows of three by three pixels, each beside the last: see `transform_weight`. */
static int may_transform(const Sum *s) {
    int64_t steps = s->stride_depth * s->stride_height * s->stride_width * s->dilation_height * s->dilation_width;
    int64_t parts = s->step_depth * s->step_height * s->step_width * s->groups * s->kernel_depth;
    return !EXACT && steps * parts == 1 && s->kernel_height == 3 && s->kernel_width == 3 && !s->pad_depth && s->depth == s->out_depth;
}

static Arranged arranged_at(const Sum *s, void *memory) {
    Arranged a = {.blocks = memory, .count = s->groups * blocks_of_group(s)};
    a.most = a.count * quads_of(s) * (2 - EXACT);
    if (may_transform(s)) a.most = a.count * POSITIONS * s->channels / 2;
    a.offsets = (int32_t *)((char *)memory + rounded(a.count * (int64_t)sizeof(Block)));
    a.weights = (int8_t *)a.offsets + rounded(a.most * (int64_t)sizeof(int32_t));
    return a;
}

/* A step that waits for a run, with the sums of its positive and its negative weights that meet in each sum of 16 bits. */
typedef struct {
    int8_t weights[STEP];
    int16_t positive[SUMS], negative[SUMS];
    int32_t offset, taken;
} Waiting;

static void total_step(Waiting *step) {
    for (int i = 0; i < SUMS; i++) {
        int first = step->weights[2 * i], second = step->weights[2 * i + 1];
        step->positive[i] = (int16_t)((first > 0 ? first : 0) + (second > 0 ? second : 0));
        step->negative[i] = (int16_t)((first < 0 ? -first : 0) + (second < 0 ? -second : 0));
    }
}

/* Move half of the weights that do not fit to a second step; return the number of steps. */
static int64_t split_step(Waiting *step, int16_t most) {
    int splits = 0;
    memset(step[1].weights, 0, sizeof step[1].weights);
    for (int i = 0; i < SUMS; i++)
        if (step->positive[i] > most || step->negative[i] > most)
            for (int j = 2 * i; j < 2 * i + 2; j++, splits = 1) {
                step[1].weights[j] = (int8_t)(step->weights[j] / 2);
                step->weights[j] = (int8_t)(step->weights[j] - step[1].weights[j]);
            }
    step[1].offset = step->offset;
    for (int i = 0; i < 1 + splits; i++) total_step(step + i);
    return 1 + splits;
}

/* Add a step to the sums of a run, if it fits. */
INLINE int fits_run(const Waiting *step, int16_t most, int16_t *positive, int16_t *negative) {
    int above = 0;
    for (int i = 0; i < SUMS; i++) above |= (positive[i] + step->positive[i] > most) | (negative[i] + step->negative[i] > most);
    if (above) return 0;
    for (int i = 0; i < SUMS; i++) positive[i] = (int16_t)(positive[i] + step->positive[i]), negative[i] = (int16_t)(negative[i] + step->negative[i]);
    return 1;
}

/* Order the steps of a block by runs, the longest first. `order` gets their indices; `runs` the number of runs of each length. */
INLINE void find_runs(Waiting *steps, int64_t count, int16_t most, int32_t *order, int32_t *runs) {
    int32_t *places = malloc((size_t)(count * (LONGEST + 1) + 1) * sizeof *places); /* of each run, its length and its steps */
    int64_t number = 0;
    for (int64_t first = 0; first < count; first++) {
        if (steps[first].taken) continue;
        int16_t positive[SUMS] = {0}, negative[SUMS] = {0};
        int32_t *run = places + number++ * (LONGEST + 1);
        *run = 0;
        for (int64_t i = first, tried = 0; i < count && tried < LOOKED && *run < LONGEST; i++) {
            if (steps[i].taken) continue;
            tried++;
            if ((steps[i].taken = fits_run(steps + i, most, positive, negative))) run[++*run] = (int32_t)i;
        }
    }
    for (int length = LONGEST; length > 0; length--)
        for (int64_t i = 0; i < number; i++) {
            const int32_t *run = places + i * (LONGEST + 1);
            if (*run != length) continue;
            runs[length - 1]++;
            for (int j = 1; j <= length; j++) *order++ = run[j];
        }
    free(places);
}

/* Of the quads of eight channels, the first two bytes of each and then the last two, as words are multiplied. */
static inline __m256i halves_of(__m256i quads) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(quads, order), _MM_SHUFFLE(3, 1, 2, 0));
}

/* The weight of a step, from one that is packed as (group, block, tap, quad of input channels, 16 output channels, 4). */
static const int8_t *packed_step(const Sum *s, int64_t block, int64_t quad) {
    int64_t group = block / blocks_of_group(s), own = block % blocks_of_group(s), doubles = (blocks_of_group(s) + 1) / 2;
    return (const int8_t *)s->weight + (((group * doubles + own / 2) * packed_quads(s) + quad) * 2 + own % 2) * STEP;
}

/* Write the weight of a step on operands as they are copied. */
static void write_step(const Sum *s, int64_t block, int64_t quad, int8_t *to) {
    if (!s->squeezed) {
        memcpy(to, packed_step(s, block, quad), STEP);
        return;
    }
    memset(to, 0, STEP);
    for (int64_t i = 0; i < QUAD; i++) {
        int64_t at = quad * QUAD + i, pixel = at / (QUAD - 1);
        for (int64_t o = 0; o < CHANNELS && pixel < packed_quads(s); o++) to[o * QUAD + i] = packed_step(s, block, pixel)[o * QUAD + at % (QUAD - 1)];
    }
}

/* Whether each pixel has three channels and one of padding, and the taps of a row are copied together. */
static int may_squeeze(const Sum *s) {
    if (s->channels != QUAD || !s->fused) return 0;
    for (int64_t block = 0; block < blocks_of_group(s); block++)
        for (int64_t quad = 0; quad < packed_quads(s); quad++)
            for (int64_t o = 0; o < CHANNELS; o++)
                if (packed_step(s, block, quad)[o * QUAD + QUAD - 1]) return 0;
    return 1;
}

/* Where the bytes of a step lie among the operands of a pixel: the channels of each tap, one tap after another. */
static int32_t offset_of(const Sum *s, int64_t block, int64_t quad) {
    if (s->squeezed) return (int32_t)(quad * QUAD);
    int64_t inner = s->channels / s->groups, of_tap = quads_of(s) / taps_of(s);
    int64_t whole = s->channels * (s->fused ? s->kernel_width : 1);
    return (int32_t)(quad / of_tap * whole + block / blocks_of_group(s) * inner + quad % of_tap * QUAD);
}

static int16_t largest_sum(const Sum *s) { return EXACT ? 2 * 128 : s->small ? 258 : 128; }

static int64_t arrange(Sum *s, const Arranged *a, int worded) {
    int64_t quads = quads_of(s), cost = 0;
    Waiting *steps = malloc((size_t)(2 * quads + 1) * sizeof *steps);
    int32_t *order = malloc((size_t)(2 * quads + 1) * sizeof *order);
    s->steps = s->runs = 0;
    for (int64_t block = 0; block < a->count; block++) {
        int64_t count = 0;
        for (int64_t quad = 0; quad < quads; quad++) {
            static const int8_t none[STEP];
            Waiting *step = steps + count;
            write_step(s, block, quad, step->weights);
            if (!EXACT && !memcmp(step->weights, none, STEP)) continue; /* as of channels that are only padding, or of another group */
            step->offset = offset_of(s, block, quad);
            total_step(step);
            count += worded ? 1 : split_step(step, largest_sum(s));
        }
        for (int64_t i = 0; i < count; i++) steps[i].taken = 0, order[i] = (int32_t)i;
        Block *own = a->blocks + block;
        memset(own, 0, sizeof *own);
        own->first = (int32_t)s->steps;
        if (worded) own->runs[0] = (int32_t)count;
        else find_runs(steps, count, largest_sum(s), order, own->runs);
        for (int64_t i = 0; i < count; i++) {
            const Waiting *step = steps + order[i];
            __m256i weights = _mm256_loadu_si256((const __m256i *)step->weights);
            _mm256_storeu_si256((__m256i *)(a->weights + (s->steps + i) * STEP), worded ? halves_of(weights) : weights);
            a->offsets[s->steps + i] = step->offset;
        }
        for (int i = 0; i < LONGEST; i++) s->runs += own->runs[i];
        s->steps += count;
    }
    cost = worded ? 6 * s->steps : 3 * s->steps + s->runs; /* of eight sums: loads, products and additions */
    free(steps);
    free(order);
    s->arranged = worded ? WORDED : BYTES;
    return cost;
}
#endif

#if WORDS
/* ---- windows of three by three pixels with fewer products ----

   Four sums of windows that lie beside each other, two by two, take 36 products of each channel; Winograd's transformation takes 16: of
   differences and sums of the 4 × 4 bytes that the windows cover (at most 1020) and of the nine weights (at most 9 · 128, as they are
   doubled for each of the two directions, so that they stay integers). Sums of these products are added and subtracted, and are four
   times the sums of the windows. In 32 bits that is right where four times a sum fits, which the weights prove here. */

/* With 2, 0, 0; 1, 1, 1; 1, -1, 1; 0, 0, 2 for the three weights of a direction. */
static int32_t doubled(int64_t i, int32_t first, int32_t second, int32_t third) {
    return i == 0 ? 2 * first : i == 3 ? 2 * third : first + (i == 1 ? second : -second) + third;
}

/* Write the transformed weight as [position][block][pair of channels][8 output channels][2], int16; return whether sums are proved to fit. */
static int transform_weight(Sum *s, const Arranged *a) {
    int16_t *to = (int16_t *)a->weights;
    int64_t channels = s->channels, pairs = channels / 2, largest = 0;
    for (int64_t block = 0; block < a->count; block++)
        for (int64_t o = 0; o < CHANNELS; o++) {
            int64_t total = 0;
            for (int64_t c = 0; c < channels; c++) {
                int32_t w[3][3], rows[4][3];
                for (int64_t tap = 0; tap < 9; tap++) {
                    w[tap / 3][tap % 3] = packed_step(s, block, (tap * channels + c) / QUAD)[o * QUAD + c % QUAD];
                    total += abs(w[tap / 3][tap % 3]);
                }
                for (int64_t i = 0; i < 4; i++)
                    for (int64_t j = 0; j < 3; j++) rows[i][j] = doubled(i, w[0][j], w[1][j], w[2][j]);
                for (int64_t i = 0; i < POSITIONS; i++) {
                    int64_t at = ((i * a->count + block) * pairs + c / 2) * 2 * CHANNELS + 2 * o + c % 2;
                    to[at] = (int16_t)doubled(i % 4, rows[i / 4][0], rows[i / 4][1], rows[i / 4][2]);
                }
            }
            largest = total > largest ? total : largest;
        }
    s->arranged = TRANSFORMED;
    s->steps = a->count * POSITIONS * pairs, s->runs = 0;
    return 4 * 255 * largest < INT32_MAX;
}

/* Instructions, as `arrange` counts them for a pixel, for all pixels: products, what reads four by four bytes, and what adds 16 sums. */
static int64_t cost_transformed(const Sum *s, const Arranged *a) {
    int64_t squares = ((s->out_height + 1) / 2) * ((s->out_width + 1) / 2);
    return squares * (POSITIONS * 3 * a->count * s->channels / 2 + 6 * s->channels + 64 * a->count);
}

/* ---- one filter for each channel: a step is two taps of each of 32 channels ---- */

static int64_t pairs_of_taps(const Sum *s) { return (taps_of(s) + 1) / 2; }

enum { BYTES_OF_FILTERS = 4 * FILTERS }; /* of a step */

static Arranged filters_at(const Sum *s, void *memory) {
    Arranged a = {.blocks = memory, .count = (s->channels + FILTERS - 1) / FILTERS};
    a.most = a.count * pairs_of_taps(s);
    a.offsets = (int32_t *)((char *)memory + rounded(a.count * (int64_t)sizeof(Block)));
    a.weights = (int8_t *)a.offsets + rounded(a.most * (int64_t)sizeof(int32_t));
    return a;
}

/* Filters are words: of bytes, what interleaves two pixels and widens sums of 16 bits takes longer than words do. */
static void arrange_filters(Sum *s, const Arranged *a) {
    const int64_t pairs = pairs_of_taps(s), taps = taps_of(s);
    s->arranged = WORDED, s->steps = s->runs = a->count * pairs;
    for (int64_t i = 0; i < s->steps; i++) {
        const int64_t block = i / pairs, pair = i % pairs;
        int16_t *to = (int16_t *)(a->weights + i * BYTES_OF_FILTERS);
        if (!pair) a->blocks[block] = (Block){.first = (int32_t)i, .runs = {(int32_t)pairs}};
        a->offsets[i] = (int32_t)(2 * pair);
        for (int64_t j = 0; j < 2 * FILTERS; j++) { /* two taps of four channels, and of four that lie 16 later, as bytes are unpacked */
            const int64_t c = block * FILTERS + j / 16 * 4 + j / 2 % 4 + j / 8 % 2 * 16, tap = 2 * pair + j % 2;
            to[j] = c < s->channels && tap < taps ? (int16_t)((const int32_t *)s->weight)[tap * s->channels + c] : 0;
        }
    }
}

static int64_t blocks_of(int64_t channels) { return (channels + FILTERS - 1) / FILTERS; }

/* How many pixels that lie side by side are filtered as one pixel, whose channels fill the blocks better; 1: each by itself. */
static int64_t beside(const Sum *s) {
    const int64_t c = s->channels, inside = s->width - (s->kernel_width - 1) * s->dilation_width;
    int64_t best = 1;
    if (s->stride_width != 1 || s->step_width != 1 || s->out_channels != c || s->out_pixel != c) return 1;
    for (int64_t n = 2; n <= AS_ONE && n <= inside; n++)
        if (blocks_of(n * c) * best < blocks_of(best * c) * n) best = n;
    return 5 * blocks_of(best * c) <= 4 * blocks_of(c) * best ? best : 1; /* the edges of a row are filtered by themselves */
}

/* The filters of pixels side by side, in memory: the constants of each channel, which are repeated, a pixel of zeros, and the arranged
   weight. */
typedef struct {
    int32_t *constants[CONSTANTS];
    uint8_t *outside;
    void *weight;
} Beside;

static int64_t channels_beside(const Sum *s) { return beside(s) * s->channels; }

static Beside beside_at(const Sum *s, void *memory) {
    const int64_t size = rounded((channels_beside(s) + SLACK) * 4);
    Beside own;
    for (int i = 0; i < CONSTANTS; i++) own.constants[i] = (int32_t *)((char *)memory + i * size);
    own.outside = (uint8_t *)memory + CONSTANTS * size;
    own.weight = own.outside + size;
    return own;
}

/* Several pixels as one: the structure for the memory in which they were arranged, or are going to be. */
static Sum as_one(const Sum *s, const Beside *own) {
    Sum one = *s;
    Epilogue *e = &one.epilogue;
    const void *to[CONSTANTS] = {own->constants[0], own->constants[1], own->constants[2], own->constants[3], own->constants[4],
                                 own->constants[5], own->constants[6], own->constants[7], own->constants[8]};
    one.channels = one.out_channels = one.out_pixel = channels_beside(s);
    one.bias = to[0], e->factor = to[1], e->shift = to[2], e->multiplier = to[3], e->right_shift = to[4], e->half = to[5], e->before = to[6];
    e->residual_factor = to[7], e->residual_shift = to[8];
    one.outside = own->outside, one.weight = own->weight, one.steps = 0;
    return one;
}

static void arrange_beside(const Sum *s, void *memory) {
    const Epilogue *e = &s->epilogue;
    const int64_t n = beside(s), c = s->channels, taps = taps_of(s);
    const Beside own = beside_at(s, memory);
    const void *of[CONSTANTS] = {s->bias, e->factor, e->shift, e->multiplier, e->right_shift, e->half, e->before, e->residual_factor, e->residual_shift};
    for (int i = 0; i < CONSTANTS; i++)
        for (int64_t j = 0; j < n * c + SLACK; j++) own.constants[i][j] = of[i] ? ((const int32_t *)of[i])[j % c] : 0;
    memset(own.outside, *s->outside, (size_t)(n * c + SLACK));
    int32_t *weight = malloc((size_t)(taps * n * c) * sizeof *weight);
    for (int64_t t = 0; t < taps; t++)
        for (int64_t j = 0; j < n * c; j++) weight[t * n * c + j] = ((const int32_t *)s->weight)[t * c + j % c];
    Sum one = as_one(s, &own);
    one.weight = weight;
    const Arranged a = filters_at(&one, own.weight);
    arrange_filters(&one, &a);
    free(weight);
}
#endif

#if WORDS
/* Whether steps are moved: the operand's zero, which lies outside, is near 128, and it costs less than other ways, `cost` at least. */
static int may_move(const Sum *s, const Arranged *a, int64_t cost) {
    return !EXACT && s->groups == 1 && abs((int)*s->outside - 128) <= NEAR && SPARED * a->count * quads_of(s) < cost;
}

/* Write the weights 128 more than they are, and to the bias what the operand adds that is 128 less. */
static void move_weight(Sum *s, const Arranged *a) {
    int64_t quads = quads_of(s);
    for (int64_t block = 0; block < a->count; block++) {
        a->blocks[block] = (Block){.first = (int32_t)(block * quads), .runs = {(int32_t)quads}};
        for (int64_t quad = 0; quad < quads; quad++) {
            int8_t w[STEP];
            write_step(s, block, quad, w);
            for (int64_t i = 0; i < STEP; i++) {
                a->weights[(block * quads + quad) * STEP + i] = (int8_t)(w[i] ^ 128);
                if (block * CHANNELS + i / QUAD < s->out_channels) ((int32_t *)s->bias)[block * CHANNELS + i / QUAD] += 128 * w[i];
            }
            a->offsets[block * quads + quad] = (int32_t)(quad * QUAD);
        }
    }
    s->arranged = MOVED, s->steps = a->count * quads, s->runs = 0;
}
#endif

#if WORDS
static int64_t bytes_of_arranged(const Sum *s) {
    const Arranged a = s->groups ? arranged_at(s, NULL) : filters_at(s, NULL);
    const int64_t step = s->groups ? STEP : BYTES_OF_FILTERS;
    return rounded((int64_t)(intptr_t)a.weights + (s->steps ? s->steps : a.most) * step);
}
#endif

/* The bytes that a weight takes once it is arranged, and at most before it is; 0 where it stays as it is packed. */
int64_t fxq_bytes_arranged(const Sum *s) {
#if WORDS
    if (!s->groups && beside(s) > 1) {
        const Beside own = beside_at(s, NULL);
        const Sum one = as_one(s, &own);
        return bytes_of_arranged(s) + (int64_t)(intptr_t)own.weight + bytes_of_arranged(&one);
    }
    return bytes_of_arranged(s);
#else
    (void)s;
    return 0;
#endif
}

/* Arrange the packed weight of a sum in the memory of its output, and write how that was done to the structure. */
void fxq_arrange(Sum *s) {
#if WORDS
    s->squeezed = s->groups == 1 && may_squeeze(s);
    Arranged a = s->groups ? arranged_at(s, s->output) : filters_at(s, s->output);
    if (!s->groups) {
        arrange_filters(s, &a);
        if (beside(s) > 1) arrange_beside(s, (char *)s->output + bytes_of_arranged(s));
        return;
    }
    int64_t cost = arrange(s, &a, 0);
    int64_t worded = EXACT ? INT64_MAX : arrange(s, &a, 1), pixels = s->out_height * s->out_width;
    if (may_transform(s) && cost_transformed(s, &a) < pixels * least(cost, worded)) {
        const int64_t squeezed = s->squeezed;
        s->squeezed = 0;
        a = arranged_at(s, s->output);
        if (transform_weight(s, &a)) return;
        s->squeezed = squeezed;
        a = arranged_at(s, s->output);
    }
    if (may_move(s, &a, least(cost, worded))) {
        move_weight(s, &a);
        return;
    }
    if (worded >= cost || s->arranged == TRANSFORMED) arrange(s, &a, worded < cost);
#else
    (void)s;
#endif
}

#if WORDS
/* The sums of one run after another, each of `length` steps, of `pixels` pixels by eight channels; x: the first operand of each pixel. */
INLINE void add_runs(const int length, const int pixels, int32_t runs, const uint8_t *const *x, const int32_t **offsets, const int8_t **weights,
                     __m256i *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int32_t *offset = *offsets;
    const int8_t *w = *weights;
    for (int32_t run = 0; run < runs; run++, offset += length, w += length * STEP) {
        __m256i factors[LONGEST];
        int64_t at[LONGEST];
#pragma GCC unroll 4
        for (int i = 0; i < length; i++) factors[i] = _mm256_loadu_si256((const __m256i *)(w + i * STEP)), at[i] = offset[i];
#pragma GCC unroll 12
        for (int m = 0; m < pixels; m++) {
            __m256i total = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int i = 0; i < length; i++) {
                int32_t word;
                memcpy(&word, x[m] + at[i], 4);
#ifdef __AVXVNNI__
                sums[m] = _mm256_dpbusd_avx_epi32(sums[m], _mm256_set1_epi32(word), factors[i]);
#else
                const __m256i products = _mm256_maddubs_epi16(_mm256_set1_epi32(word), factors[i]);
                total = i ? _mm256_add_epi16(total, products) : products;
                __asm__("" : "+x"(total));
#endif
            }
            if (!EXACT) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(total, ones));
        }
    }
    *offsets = offset;
    *weights = w;
}

/* The sums of steps whose operands were widened. */
INLINE void add_words(const int pixels, int32_t steps, const uint8_t *const *x, const int32_t *offset, const int8_t *w, __m256i *sums) {
    for (int32_t step = 0; step < steps; step++, offset++, w += STEP) {
        const int64_t at = 2 * *offset;
        __m256i factors[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) factors[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w + i));
#pragma GCC unroll 12
        for (int m = 0; m < pixels; m++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                int32_t words;
                memcpy(&words, x[m] + at + 4 * i, 4);
                sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_set1_epi32(words), factors[i]));
            }
    }
}

/* What is too much in four bytes of the operands of a tile, where they are moved. */
typedef struct {
    int32_t step;
    int8_t rest[SIDE][QUAD];
} Apart;

/* The operands of pixels: `pitch` bytes from one to the next. */
typedef struct {
    const uint8_t *rows;
    const int64_t *places;
    int64_t pitch;
    int32_t *totals;    /* where operands are moved, what each pixel adds to all sums */
    Apart *apart;       /* and what is too much, of one tile after another, */
    int32_t *starts;    /* from here on for each tile */
} Pixels;

static int64_t next_tile(int64_t count) { return count >= SIDE ? SIDE : count >= 4 ? 4 : 1; }

/* The sums of steps whose weights are bytes and whose operands are signed. */
INLINE void add_moved(const int pixels, int64_t steps, const uint8_t *const *x, const int8_t *w, const Apart *apart, const Apart *end, __m256i *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t *weights = w;
    for (int64_t at = 0; at < steps * QUAD; at += QUAD, w += STEP) {
        const __m256i factors = _mm256_loadu_si256((const __m256i *)w);
#pragma GCC unroll 12
        for (int m = 0; m < pixels; m++) {
            int32_t word;
            memcpy(&word, x[m] + at, 4);
            sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_maddubs_epi16(factors, _mm256_set1_epi32(word)), ones));
        }
    }
    for (; apart < end; apart++) {
        const __m256i factors = _mm256_loadu_si256((const __m256i *)(weights + apart->step * STEP));
#pragma GCC unroll 12
        for (int m = 0; m < pixels; m++) {
            int32_t word;
            memcpy(&word, apart->rest[m], 4);
            sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_maddubs_epi16(factors, _mm256_set1_epi32(word)), ones));
        }
    }
}

/* Make the bytes of `count` pixels signed, 128 less, and part what is too much of them. Rows are whole vectors. */
static void move_rows(uint8_t *rows, int64_t count, const Pixels *p) {
    const __m256i half = _mm256_set1_epi8((char)128), ones = _mm256_set1_epi8(1), most = _mm256_set1_epi16(128), zero = _mm256_setzero_si256();
    Apart *apart = p->apart;
    int64_t tile = 0;
    for (int64_t first = 0, pixels; first < count; first += pixels) {
        pixels = next_tile(count - first);
        p->starts[tile++] = (int32_t)(apart - p->apart);
        uint8_t *row = rows + first * p->pitch;
        __m256i totals[SIDE];
        for (int64_t m = 0; m < pixels; m++) totals[m] = zero;
        for (int64_t at = 0; at < p->pitch; at += 32) {
            uint32_t masks[SIDE], any = 0;
            for (int64_t m = 0; m < pixels; m++) {
                __m256i *place = (__m256i *)(row + m * p->pitch + at), bytes = _mm256_loadu_si256(place), x = _mm256_xor_si256(bytes, half);
                totals[m] = _mm256_add_epi64(totals[m], _mm256_sad_epu8(bytes, zero));
                _mm256_storeu_si256(place, x);
                const __m256i above = _mm256_maddubs_epi16(_mm256_max_epi8(x, zero), ones);
                const __m256i below = _mm256_maddubs_epi16(_mm256_abs_epi8(_mm256_min_epi8(x, zero)), ones);
                any |= masks[m] = (uint32_t)_mm256_movemask_epi8(_mm256_cmpgt_epi16(_mm256_max_epi16(above, below), most));
            }
            for (int64_t k = 0; any; k++, any >>= QUAD) {
                if (!(any & 15)) continue;
                apart->step = (int32_t)(at / QUAD + k);
                for (int64_t m = 0; m < pixels; m++)
                    for (int64_t i = 0; i < QUAD; i++) {
                        int8_t *x = (int8_t *)row + m * p->pitch + at + QUAD * k + i, kept = (int8_t)(masks[m] >> (QUAD * k) & 15 ? *x / 2 : *x);
                        apart->rest[m][i] = (int8_t)(*x - kept);
                        *x = kept;
                    }
                apart++;
            }
        }
        for (int64_t m = 0; m < pixels; m++) {
            const __m128i both = _mm_add_epi64(_mm256_castsi256_si128(totals[m]), _mm256_extracti128_si256(totals[m], 1));
            p->totals[first + m] = (int32_t)(-128 * (_mm_cvtsi128_si64(both) + _mm_extract_epi64(both, 1) - 128 * p->pitch));
        }
    }
    p->starts[tile] = (int32_t)(apart - p->apart);
}

/* Finish the sums of `pixels` pixels by eight channels, or by fewer: `to` says where these pixels are written. */
INLINE void finish_tile(const Sum *s, const int pixels, const int64_t *to, int64_t channel, int64_t channels, const __m256i *sums) {
#define TILED(MODE, ADDS)                                                                                                              \
    if (channels == CHANNELS) { TILED_OF(MODE, ADDS, CHANNELS) } else { TILED_OF(MODE, ADDS, channels) }
#define TILED_OF(MODE, ADDS, COUNT)                                                                                                    \
    const Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, channel, 4);                                                                \
    _Pragma("GCC unroll 12") for (int i = 0; i < pixels; i += 2) {                                                                     \
        const int two = i + 1 < pixels;                                                                                                \
        const int64_t places[2] = {to[i] + channel, to[i + two] + channel};                                                            \
        __m256i both[2];                                                                                                               \
        for (int j = 0; j < 1 + two; j++)                                                                                              \
            both[j] = finished(&s->epilogue, &lanes, MODE, ADDS, sums[i + j],                                                          \
                               ADDS ? residual_of(s->residual + places[j], COUNT) : _mm_setzero_si128());                              \
        store_pair(&s->epilogue, MODE, COUNT, s->output, places, both, two);                                                           \
    }
    FOR_EACH_EPILOGUE(s, TILED)
}

/* The sums of `pixels` pixels by eight channels, from `m` on, finished. */
INLINE void tile_of(const Sum *s, const int pixels, const Arranged *a, const Block *own, const Pixels *from, int64_t m, int64_t channel,
                    int64_t channels) {
    const int32_t *offsets = a->offsets + own->first;
    const int8_t *weights = a->weights + own->first * STEP;
    const uint8_t *x[SIDE];
    const __m256i bias = _mm256_loadu_si256((const __m256i *)(s->bias + channel));
    __m256i sums[SIDE];
#pragma GCC unroll 12
    for (int i = 0; i < pixels; i++) {
        sums[i] = bias;
        x[i] = from->rows + (m + i) * from->pitch;
        __asm__("" : "+r"(x[i])); /* stays in a register of its own, in place of an addition for each operand */
    }
    if (s->arranged == WORDED) add_words(pixels, own->runs[0], x, offsets, weights, sums);
    else if (!EXACT && s->arranged == MOVED) {
        const int64_t tile = m / SIDE + m % SIDE / 4 + m % 4;
#pragma GCC unroll 12
        for (int i = 0; i < pixels; i++) sums[i] = _mm256_add_epi32(sums[i], _mm256_set1_epi32(from->totals[m + i]));
        add_moved(pixels, own->runs[0], x, weights, from->apart + from->starts[tile], from->apart + from->starts[tile + 1], sums);
    } else {
        if (!EXACT) add_runs(4, pixels, own->runs[3], x, &offsets, &weights, sums);
        if (!EXACT) add_runs(3, pixels, own->runs[2], x, &offsets, &weights, sums);
        if (!EXACT) add_runs(2, pixels, own->runs[1], x, &offsets, &weights, sums);
        add_runs(1, pixels, own->runs[0], x, &offsets, &weights, sums);
    }
    finish_tile(s, pixels, from->places + m, channel, channels, sums);
}

/* The sums of pixels from `m` on by the eight channels of a block. */
static void block_of(const Sum *s, const Arranged *a, int64_t block, const Pixels *from, int64_t m, int64_t count) {
    const int64_t outer = s->out_channels / s->groups, of_group = blocks_of_group(s), group = block / of_group;
    const int64_t channel = group * outer + block % of_group * CHANNELS, channels = least(CHANNELS, (group + 1) * outer - channel);
    for (; m + SIDE <= count; m += SIDE) tile_of(s, SIDE, a, a->blocks + block, from, m, channel, channels);
    for (; m + 4 <= count; m += 4) tile_of(s, 4, a, a->blocks + block, from, m, channel, channels);
    for (; m < count; m++) tile_of(s, 1, a, a->blocks + block, from, m, channel, channels);
}

#ifdef __AVXVNNI__
enum { NARROW = 6 }; /* pixels by two blocks: an operand that was read is multiplied twice */

/* The sums of whole tiles of two blocks of a group, whose steps have the same order; return the number of their pixels. */
static int64_t two_blocks(const Sum *s, const Arranged *a, int64_t block, const Pixels *from, int64_t count) {
    const Block *own = a->blocks + block;
    const int64_t outer = s->out_channels / s->groups, of_group = blocks_of_group(s), group = block / of_group;
    const int64_t channel = group * outer + block % of_group * CHANNELS, channels = (group + 1) * outer - channel;
    const __m256i bias[2] = {_mm256_loadu_si256((const __m256i *)(s->bias + channel)), _mm256_loadu_si256((const __m256i *)(s->bias + channel + 8))};
    int64_t m = 0;
    for (; m + NARROW <= count; m += NARROW) {
        const int32_t *offset = a->offsets + own->first;
        const int8_t *w = a->weights + own->first * STEP, *other = w + own->runs[0] * STEP;
        const uint8_t *x[NARROW];
        __m256i totals[2][NARROW], sums[2][NARROW]; /* sums are in memory, for what finishes them */
#pragma GCC unroll 6
        for (int i = 0; i < NARROW; i++) {
            totals[0][i] = bias[0], totals[1][i] = bias[1], x[i] = from->rows + (m + i) * from->pitch;
            __asm__("" : "+r"(x[i]));
        }
        for (int32_t run = 0; run < own->runs[0]; run++, offset++, w += STEP, other += STEP) {
            const int64_t at = *offset;
            const __m256i factors = _mm256_loadu_si256((const __m256i *)w), others = _mm256_loadu_si256((const __m256i *)other);
#pragma GCC unroll 6
            for (int i = 0; i < NARROW; i++) {
                int32_t word;
                memcpy(&word, x[i] + at, 4);
                const __m256i bytes = _mm256_set1_epi32(word);
                totals[0][i] = _mm256_dpbusd_avx_epi32(totals[0][i], bytes, factors);
                totals[1][i] = _mm256_dpbusd_avx_epi32(totals[1][i], bytes, others);
            }
        }
        memcpy(sums, totals, sizeof sums);
        finish_tile(s, NARROW, from->places + m, channel, CHANNELS, sums[0]);
        finish_tile(s, NARROW, from->places + m, channel + CHANNELS, least(CHANNELS, channels - CHANNELS), sums[1]);
    }
    return m;
}
#endif

/* The sums of pixels by a block, or, with dot products of bytes, by two; return the number of blocks. */
static int64_t blocks_at(const Sum *s, const Arranged *a, int64_t block, const Pixels *from, int64_t count) {
#ifdef __AVXVNNI__
    if ((block + 1) % blocks_of_group(s)) {
        int64_t m = two_blocks(s, a, block, from, count);
        block_of(s, a, block, from, m, count);
        block_of(s, a, block + 1, from, m, count);
        return 2;
    }
#endif
    block_of(s, a, block, from, 0, count);
    return 1;
}

/* Copy a number of bytes that is a multiple of four; as words if they are widened. */
INLINE void copy_run(uint8_t *to, const uint8_t *from, int64_t size, int widens) {
    int64_t i = 0;
    if (widens) {
        for (; i + 16 <= size; i += 16)
            _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(from + i))));
        for (; i < size; i += 4) {
            int32_t word;
            memcpy(&word, from + i, 4);
            _mm_storel_epi64((__m128i *)(to + 2 * i), _mm_cvtepu8_epi16(_mm_cvtsi32_si128(word)));
        }
        return;
    }
    for (; i + 32 <= size; i += 32) _mm256_storeu_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
    for (; i + 16 <= size; i += 16) _mm_storeu_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
    for (; i < size; i += 4) memcpy(to + i, from + i, 4);
}

/* Copy pixels of four bytes without the fourth. Vectors read and write up to 16 bytes more. */
static void squeeze_run(uint8_t *to, const uint8_t *from, int64_t pixels) {
    const __m128i order = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    for (int64_t i = 0; i < pixels; i += 4)
        _mm_storeu_si128((__m128i *)(to + 3 * i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(from + 4 * i)), order));
}

/* Whether the operands of a pixel are that pixel of the input. */
static int reads_pixels(const Sum *s) {
    int64_t taps = s->kernel_depth * s->kernel_height * s->kernel_width, moves = s->stride_depth * s->stride_height * s->stride_width;
    return taps == 1 && moves == 1 && !(s->pad_depth | s->pad_height | s->pad_width) && s->depth == s->out_depth &&
           s->height == s->out_height && s->width == s->out_width;
}

/* Two vectors or sums become four: first - third, second + third, third - second, second - fourth. */
#define DIRECTION(SUB, ADD, A, B, C, D, TO, STEP_OF)                                                                                   \
    (TO)[0] = SUB(A, C), (TO)[STEP_OF] = ADD(B, C), (TO)[2 * STEP_OF] = SUB(C, B), (TO)[3 * STEP_OF] = SUB(B, D)

/* The transformed bytes of one square: of each position `apart` words. `at` are its 4 × 4 pixels. */
static void transform_square(const uint8_t *const *at, int64_t channels, int16_t *to, int64_t apart) {
    for (int64_t c = 0; c < channels; c += 16) { /* the last words may be of bytes that follow a pixel, and are not read */
        __m256i x[16], down[16], across[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) x[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(at[i] + c)));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) DIRECTION(_mm256_sub_epi16, _mm256_add_epi16, x[j], x[4 + j], x[8 + j], x[12 + j], down + j, 4);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4)
            DIRECTION(_mm256_sub_epi16, _mm256_add_epi16, down[i], down[i + 1], down[i + 2], down[i + 3], across + i, 1);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm256_storeu_si256((__m256i *)(to + i * apart + c), across[i]);
    }
}

/* The sums of products of words at one position, of SIDE squares by eight channels. */
static void sum_position(const int16_t *x, int64_t pitch, const int16_t *w, int64_t pairs, __m256i *to) {
    const int16_t *rows[SIDE];
    __m256i sums[SIDE];
#pragma GCC unroll 12
    for (int m = 0; m < SIDE; m++) {
        sums[m] = _mm256_setzero_si256();
        rows[m] = x + m * pitch;
        __asm__("" : "+r"(rows[m]));
    }
    for (int64_t k = 0; k < pairs; k++, w += 2 * CHANNELS) {
        const __m256i factors = _mm256_loadu_si256((const __m256i *)w);
#pragma GCC unroll 12
        for (int m = 0; m < SIDE; m++) {
            int32_t pair;
            memcpy(&pair, rows[m] + 2 * k, 4);
            sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_set1_epi32(pair), factors));
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < SIDE; m++) _mm256_store_si256(to + m, sums[m]);
}

/* The four sums of a square, from those of its positions, which lie `apart` vectors from each other. */
INLINE void square_of(const __m256i *sums, int64_t apart, __m256i bias, __m256i *to) {
    __m256i down[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i second = sums[(4 + j) * apart], third = sums[(8 + j) * apart];
        down[0][j] = _mm256_add_epi32(_mm256_add_epi32(sums[j * apart], second), third);
        down[1][j] = _mm256_sub_epi32(_mm256_sub_epi32(second, third), sums[(12 + j) * apart]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256i first = _mm256_add_epi32(_mm256_add_epi32(down[i][0], down[i][1]), down[i][2]);
        const __m256i second = _mm256_sub_epi32(_mm256_sub_epi32(down[i][1], down[i][2]), down[i][3]);
        to[2 * i] = _mm256_add_epi32(_mm256_srai_epi32(first, 2), bias);
        to[2 * i + 1] = _mm256_add_epi32(_mm256_srai_epi32(second, 2), bias);
    }
}

/* Squares of four pixels of the output, of all images. */
typedef struct {
    int64_t high, wide, all; /* of an image, and their number */
} Squares;

/* The places of the four pixels of a square in the output, -1 where they are outside, and the 4 × 4 pixels that they read. */
static void find_square(const Sum *s, const Squares *q, int64_t square, int64_t *places, const uint8_t **at) {
    int64_t plane = square / q->wide / q->high, y = square / q->wide % q->high * 2, x = square % q->wide * 2;
    for (int64_t i = 0; i < 4; i++) {
        int64_t line = y + i / 2, column = x + i % 2;
        int inside = line < s->out_height && column < s->out_width;
        places[i] = inside ? ((plane * s->out_height + line) * s->out_width + column) * s->out_pixel : -1;
    }
    for (int64_t i = 0; i < POSITIONS; i++) {
        int64_t line = y + i / 4 - s->pad_height, column = x + i % 4 - s->pad_width;
        int inside = line >= 0 && column >= 0 && line < s->height && column < s->width;
        at[i] = inside ? s->input + ((plane * s->height + line) * s->width + column) * s->channels : s->outside;
    }
}

static void store_square(const Sum *s, const int64_t *places, const __m256i *sums, int64_t channel, int64_t channels) {
#define SQUARE(MODE, ADDS)                                                                                                             \
    {                                                                                                                                  \
        const Lanes lanes = lanes_of(&s->epilogue, MODE, ADDS, channel, 4);                                                            \
        for (int i = 0; i < 4; i++) {                                                                                                  \
            if (places[i] < 0) continue;                                                                                               \
            const int64_t place = places[i] + channel;                                                                                 \
            const __m128i residual = ADDS ? residual_of(s->residual + place, channels) : _mm_setzero_si128();                          \
            const __m256i v = finished(&s->epilogue, &lanes, MODE, ADDS, sums[i], residual);                                           \
            store_pair(&s->epilogue, MODE, channels, s->output, &place, &v, 0);                                                        \
        }                                                                                                                              \
    }
    FOR_EACH_EPILOGUE(s, SQUARE)
}

static void sum_squares(const Sum *s) {
    const Arranged a = arranged_at(s, (void *)s->weight);
    const Squares q = {(s->out_height + 1) / 2, (s->out_width + 1) / 2, s->batch * s->out_depth * ((s->out_height + 1) / 2) * ((s->out_width + 1) / 2)};
    const int64_t pitch = (s->channels + 15) / 16 * 16, pairs = s->channels / 2, fitting = (1 << 17) / POSITIONS / pitch / SIDE * SIDE;
    const int64_t size = fitting < 4 * SIDE ? 4 * SIDE : fitting > 8 * SIDE ? 8 * SIDE : fitting;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        int16_t *words = aligned_alloc(64, (size_t)(POSITIONS * size * pitch) * sizeof *words);
        __m256i *sums = aligned_alloc(64, (size_t)(POSITIONS * size) * sizeof *sums);
        int64_t *places = malloc((size_t)(4 * size) * sizeof *places);
#pragma omp for
        for (int64_t first = 0; first < q.all; first += size) {
            int64_t count = least(size, q.all - first), whole = (count + SIDE - 1) / SIDE * SIDE;
            const uint8_t *at[POSITIONS];
            for (int64_t m = 0; m < count; m++) {
                find_square(s, &q, first + m, places + 4 * m, at);
                transform_square(at, s->channels, words + m * pitch, size * pitch);
            }
            for (int64_t i = 0; i < POSITIONS; i++) /* squares that are computed, but not stored */
                memset(words + (i * size + count) * pitch, 0, (size_t)((whole - count) * pitch) * sizeof *words);
            for (int64_t block = 0; block < a.count; block++) {
                const int64_t channel = block * CHANNELS, channels = least(CHANNELS, s->out_channels - channel);
                const __m256i bias = _mm256_loadu_si256((const __m256i *)(s->bias + channel));
                for (int64_t i = 0; i < POSITIONS; i++) {
                    const int16_t *w = (const int16_t *)a.weights + (i * a.count + block) * pairs * 2 * CHANNELS;
                    for (int64_t m = 0; m < whole; m += SIDE) sum_position(words + (i * size + m) * pitch, pitch, w, pairs, sums + i * size + m);
                }
                for (int64_t m = 0; m < count; m++) {
                    __m256i four[4];
                    square_of(sums + m, size, bias, four);
                    store_square(s, places + 4 * m, four, channel, channels);
                }
            }
        }
        free(words);
        free(sums);
        free(places);
    }
}

enum { KEPT = 1 << 17, FEWEST = 24, MOST = 192 }; /* KEPT: bytes of operands that are computed at a time, of FEWEST to MOST pixels */

static void sum_arranged(const Sum *s) {
    const Arranged a = arranged_at(s, (void *)s->weight);
    const int64_t pixels = s->batch * s->out_depth * s->out_height * s->out_width, taps = taps_of(s), widens = s->arranged == WORDED;
    const int64_t run = s->channels * (s->fused ? s->kernel_width : 1), moves = s->arranged == MOVED, in_place = reads_pixels(s) && !widens && !moves;
    const int64_t linear = reads_pixels(s) && s->step_depth * s->step_height * s->step_width == 1; /* the pixels of the result, in their order */
    const int64_t depth = (s->squeezed ? quads_of(s) * QUAD : taps * run) * (1 + widens), pitch = in_place ? s->channels : moves ? (depth + 31) / 32 * 32 : depth;
    const int64_t fitting = KEPT / pitch / SIDE * SIDE;
    const int64_t size = fitting < FEWEST ? FEWEST : fitting > MOST ? MOST : fitting;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        const uint8_t **table = malloc(bytes_of_table(s, size));
        uint8_t *rows = in_place ? NULL : malloc((size_t)(size * pitch + 64));
        uint8_t *line = malloc((size_t)(quads_of(s) * QUAD + 64));
        int32_t *totals = moves ? malloc((size_t)(2 * size + SIDE) * sizeof *totals) : NULL;
        Apart *apart = moves ? malloc((size_t)((size / SIDE + 4) * pitch / QUAD) * sizeof *apart) : NULL;
#pragma omp for
        for (int64_t first = 0; first < pixels; first += size) {
            int64_t count = least(size, pixels - first);
            int64_t *places = (int64_t *)places_of(s, table, size);
            if (linear) for (int64_t m = 0; m < count; m++) places[m] = (first + m) * s->out_pixel;
            else find_pixels(s, first, count, size, table);
            for (int64_t m = 0; m < count && s->squeezed; m++) {
                uint8_t *to = widens ? line : rows + m * pitch;
                for (int64_t t = 0; t < taps; t++) squeeze_run(to + t * s->kernel_width * (QUAD - 1), table[t * size + m], s->kernel_width);
                if (widens) copy_run(rows + m * pitch, line, depth / 2, 1);
            }
            for (int64_t m = 0; m < count && !in_place && !s->squeezed; m++)
                for (int64_t t = 0; t < taps; t++) {
                    uint8_t *to = rows + m * pitch + t * run * (1 + widens);
                    const uint8_t *pixel = linear ? s->input + (first + m) * run : table[t * size + m];
                    if (widens) copy_run(to, pixel, run, 1);
                    else copy_run(to, pixel, run, 0);
                }
            const Pixels from = {in_place ? s->input + first * pitch : rows, places, pitch, totals, apart, totals + size};
            for (int64_t m = 0; m < count && moves; m++) memset(rows + m * pitch + depth, 128, (size_t)(pitch - depth));
            if (moves) move_rows(rows, count, &from);
            for (int64_t block = 0; block < a.count; block += blocks_at(s, &a, block, &from, count)) {}
        }
        free((void *)table);
        free(rows);
        free(line);
        free(totals);
        free(apart);
    }
}
#endif

/* Σ x·w + bias over the channels of each group, which are a multiple of four, and requantized. */
void fxq_convolution(const Sum *s) {
#if VNNI
    int64_t pixels = s->batch * s->out_depth * s->out_height * s->out_width, blocks = (s->out_channels / s->groups + 15) / 16, size = CHUNK;
    int64_t chunks = 0;
#if AMX
    int64_t in_place = s->in_place && pixels >= ROWS / 2, tiled = in_place ? 0 : tiled_pixels(s), pitch = pitch_of(s);
    Division division = {0};
    if (in_place) {
        division = divided(s);
        chunks = division.chunks;
        size = division.planes * computed(s, division.lines, division.width);
        pitch = 0;
    } else if (tiled) size = tiled;
    int64_t steps = in_place ? taps_of(s) * ((run_of(s) + DEEP - 1) / DEEP) : (depth_of(s) + DEEP - 1) / DEEP;
    int64_t copied = in_place ? division.planes * division.copied + (ROWS * s->stride_width + 1) * s->channels + DEEP : size * pitch;
#endif
    if (!chunks) chunks = (pixels + size - 1) / size;
    int64_t parts = chunks * s->groups >= 4 * s->threads ? 1 : least(blocks, 4 * s->threads), part = (blocks + parts - 1) / parts;
    if (part < 4) part = least(blocks, 4);
    parts = (blocks + part - 1) / part;
    int64_t jobs = chunks * parts * s->groups;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        const uint8_t **table = NULL;
        int64_t at = -1;
#if AMX
        Operands operands = {.pitch = pitch, .deep = steps};
        if (in_place || tiled) {
            operands.bytes = aligned_alloc(DEEP, (size_t)upward(copied, DEEP));
            operands.bases = malloc((size_t)(size / ROWS) * sizeof *operands.bases);
            operands.places = malloc((size_t)size * sizeof *operands.places);
            operands.steps = malloc((size_t)steps * sizeof *operands.steps);
            for (int64_t k = 0; k < steps; k++) operands.steps[k] = k * DEEP;
            begin_tiles();
        }
        if (!in_place)
#endif
            table = malloc(bytes_of_table(s, size));
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < jobs; job++) {
            int64_t chunk = job / (parts * s->groups), group = job / parts % s->groups, begin = job % parts * part;
            int64_t first = chunk * size, count = least(size, pixels - first);
            if (at != chunk && table) find_pixels(s, first, count, size, table);
#if AMX
            if (in_place && at != chunk) find_operands(s, &division, chunk, &operands);
            if (tiled && (at != chunk || s->groups > 1)) collect(s, table, size, group * (s->channels / s->groups), count, &operands);
            if (in_place || tiled) tiles_of(s, group, &operands, begin, least(begin + part, blocks));
            else
#endif
                chunk_of(s, group, count, begin, least(begin + part, blocks), table);
            at = chunk;
        }
#if AMX
        if (in_place || tiled) _tile_release();
        free(operands.bytes);
        free((void *)operands.bases);
        free(operands.places);
        free(operands.steps);
#endif
        free((void *)table);
    }
#elif WORDS
    if (s->arranged == TRANSFORMED) sum_squares(s);
    else sum_arranged(s);
#else
    (void)s;
#endif
}

/* ---- products of two activations ---- */

typedef struct {
    const uint8_t *input, *other;      /* their elements, int8 or uint8, by their strides */
    int32_t *output;                   /* (batch, rows, columns), without gaps */
    const int64_t *sizes, *strides;    /* of three dimensions of the batch; the strides of input and other in these, and in their last two */
    int64_t rows, depth, columns;
    int64_t input_flip, other_flip;    /* 128 turns int8 into the byte that is 128 more, and uint8 into the int8 that is 128 less */
    int64_t input_zero, other_zero;    /* of these bytes and int8 */
    int64_t threads;
} Product;

#if VNNI || WORDS
/* Write `columns` columns of a quad of rows as one vector of a weight, and add them to their sums. */
INLINE void pack_block(const uint8_t *from, int64_t row, int64_t column, int64_t rows, int64_t columns, uint8_t turn, int8_t *to, int32_t *sums) {
    if (rows == 4 && columns == 16 && column == 1) {
        __m128i r[4], low, high, flip = _mm_set1_epi8((char)turn), quads[4];
        for (int i = 0; i < 4; i++) r[i] = _mm_xor_si128(_mm_loadu_si128((const void *)(from + i * row)), flip);
        low = _mm_unpacklo_epi8(r[0], r[1]), high = _mm_unpackhi_epi8(r[0], r[1]);
        r[0] = _mm_unpacklo_epi8(r[2], r[3]), r[1] = _mm_unpackhi_epi8(r[2], r[3]);
        quads[0] = _mm_unpacklo_epi16(low, r[0]), quads[1] = _mm_unpackhi_epi16(low, r[0]);
        quads[2] = _mm_unpacklo_epi16(high, r[1]), quads[3] = _mm_unpackhi_epi16(high, r[1]);
        memcpy(to, quads, 64);
    } else if (rows == 4 && row == 1)
        for (int64_t n = 0; n < columns; n++) {
            uint32_t word;
            memcpy(&word, from + n * column, 4);
            word ^= 0x01010101u * turn;
            memcpy(to + 4 * n, &word, 4);
        }
    else
        for (int64_t n = 0; n < columns; n++)
            for (int64_t k = 0; k < rows; k++) to[4 * n + k] = (int8_t)(from[k * row + n * column] ^ turn);
#if VNNI
    _mm512_storeu_si512(sums, _mm512_dpbusd_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi8(1), _mm512_loadu_si512(to)));
#else
    const __m256i ones = _mm256_set1_epi8(1), words = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) {
        __m256i *sum = (__m256i *)sums + i, quads = _mm256_loadu_si256((const __m256i *)to + i);
        quads = _mm256_madd_epi16(_mm256_maddubs_epi16(ones, quads), words);
        _mm256_storeu_si256(sum, _mm256_add_epi32(_mm256_loadu_si256(sum), quads));
    }
#endif
}
#endif

/* Σ (a - input_zero) (b - other_zero) = Σ a·b - input_zero Σ b - other_zero Σ a + depth · input_zero · other_zero, in 32 bits. */
void fxq_product(const Product *p) {
#if VNNI || WORDS
    int64_t quads = (p->depth + 3) / 4, pixel = 4 * quads, blocks = (p->columns + 15) / 16, count = p->sizes[0] * p->sizes[1] * p->sizes[2];
    const int64_t *of_input = p->strides, *of_other = p->strides + 5;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1 && count > 1)
    {
        uint8_t *bytes = calloc((size_t)(p->rows * pixel + 64), 1);
        int8_t *weight = malloc((size_t)((blocks * quads + 16) * 64)); /* tiles read up to 15 quads more */
        int32_t *bias = malloc((size_t)blocks * 64), *sums = malloc((size_t)p->rows * 4);
        Sum sum = {.input = bytes, .outside = bytes, .weight = weight, .bias = bias, .batch = p->rows, .channels = pixel, .threads = 1};
        set_one_pixel(&sum);
        sum.out_channels = sum.out_pixel = p->columns;
#if WORDS
        sum.arranged = EXACT ? BYTES : labs(p->input_zero - 128) <= NEAR ? MOVED : WORDED;
        const Arranged arranged = arranged_at(&sum, malloc((size_t)fxq_bytes_arranged(&sum)));
        sum.weight = arranged.blocks;
        for (int64_t block = 0; block < arranged.count; block++) {
            arranged.blocks[block] = (Block){.first = (int32_t)(block * quads), .runs = {(int32_t)quads}};
            for (int64_t k = 0; k < quads; k++) arranged.offsets[block * quads + k] = (int32_t)(QUAD * k);
        }
#endif
#pragma omp for
        for (int64_t item = 0; item < count; item++) {
            int64_t z = item % p->sizes[2], y = item / p->sizes[2] % p->sizes[1], x = item / p->sizes[2] / p->sizes[1];
            const uint8_t *a = p->input + x * of_input[0] + y * of_input[1] + z * of_input[2];
            const uint8_t *b = p->other + x * of_other[0] + y * of_other[1] + z * of_other[2];
            uint8_t flip = (uint8_t)p->input_flip, turn = (uint8_t)p->other_flip;
            for (int64_t m = 0; m < p->rows; m++) {
                int32_t total = 0;
                const uint8_t *from = a + m * of_input[3];
                uint8_t *to = bytes + m * pixel;
                if (of_input[4] == 1) for (int64_t k = 0; k < p->depth; k++) to[k] = from[k] ^ flip;
                else for (int64_t k = 0; k < p->depth; k++) to[k] = from[k * of_input[4]] ^ flip;
                for (int64_t k = 0; k < p->depth; k++) total += to[k];
                sums[m] = (int32_t)(p->depth * p->input_zero - total) * (int32_t)p->other_zero;
            }
            memset(weight, 0, (size_t)((blocks * quads + 16) * 64));
            memset(bias, 0, (size_t)blocks * 64);
            for (int64_t block = 0; block < blocks; block++)
                for (int64_t k = 0; k < p->depth; k += 4) {
                    const uint8_t *from = b + k * of_other[3] + 16 * block * of_other[4];
                    pack_block(from, of_other[3], of_other[4], least(4, p->depth - k), least(16, p->columns - 16 * block), turn,
                               weight + (block * quads + k / 4) * 64, bias + 16 * block);
                }
#if WORDS
            for (int64_t i = 0; i < 2 * blocks * quads; i++) { /* of both halves of each vector */
                int64_t block = i / 2 / quads * 2 + i % 2;
                __m256i eight = _mm256_loadu_si256((const __m256i *)(weight + i * STEP));
                if (block >= arranged.count) continue;
                __m256i *to = (__m256i *)(arranged.weights + (block * quads + i / 2 % quads) * STEP);
                if (sum.arranged == MOVED) eight = _mm256_xor_si256(eight, _mm256_set1_epi8((char)128));
                _mm256_storeu_si256(to, sum.arranged == WORDED ? halves_of(eight) : eight);
            }
#endif
#if WORDS
            const int32_t taken = sum.arranged == MOVED ? 128 : 0; /* from the operand, where its sum is computed */
#else
            const int32_t taken = 0;
#endif
            for (int64_t n = 0; n < p->columns; n++) bias[n] *= taken - (int32_t)p->input_zero;
            sum.output = p->output + item * p->rows * p->columns;
            fxq_convolution(&sum);
            if (p->other_zero)
                for (int64_t m = 0; m < p->rows; m++)
                    for (int64_t n = 0; n < p->columns; n++) ((int32_t *)sum.output)[m * p->columns + n] += sums[m];
        }
#if WORDS
        free(arranged.blocks);
#endif
        free(bytes);
        free(weight);
        free(bias);
        free(sums);
    }
#else
    (void)p;
#endif
}

/* ---- one filter for each channel ---- */

#if VNNI
#define FILTERED 6 /* pixels side by side */
INLINE void filter_tile(const Sum *s, const uint8_t *const *table, int64_t m, int64_t count, int64_t c, int mode, int adds, int full) {
    int64_t taps = taps_of(s), channels = s->channels;
    __mmask16 mask = mask_of(channels - c);
    __m512i bias = _mm512_maskz_loadu_epi32(mask, s->bias + c), sum[FILTERED];
    const int32_t *weight = (const int32_t *)s->weight + c;
    const int64_t *places = places_of(s, table, s->out_width) + m;
    Lanes lanes = lanes_of(&s->epilogue, mode, adds, c, mask);
#pragma GCC unroll 8
    for (int i = 0; i < FILTERED; i++) sum[i] = bias;
    for (int64_t t = 0; t < taps; t++) {
        __m512i w = full ? _mm512_loadu_si512(weight + t * channels) : _mm512_maskz_loadu_epi32(mask, weight + t * channels);
        const uint8_t *const *pixel = table + t * s->out_width + m;
#pragma GCC unroll 8
        for (int i = 0; i < FILTERED; i++) {
            const uint8_t *p = pixel[full || i < count ? i : 0] + c;
            __m128i bytes = full ? _mm_loadu_si128((const __m128i *)p) : _mm_maskz_loadu_epi8(mask, p);
            sum[i] = _mm512_dpwssd_epi32(sum[i], _mm512_cvtepu8_epi32(bytes), w);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < FILTERED; i++)
        if (full || i < count) finish(&s->epilogue, &lanes, mode, adds, full, sum[i], mask, s->residual, s->output, places[i] + c);
}

INLINE void filter_row(const Sum *s, const uint8_t *const *table, int mode, int adds) {
    for (int64_t m = 0; m < s->out_width; m += FILTERED)
        for (int64_t c = 0; c < s->channels; c += 16) {
            int64_t count = least(FILTERED, s->out_width - m);
            if (count == FILTERED && s->channels - c >= 16) filter_tile(s, table, m, count, c, mode, adds, 1);
            else filter_tile(s, table, m, count, c, mode, adds, 0);
        }
}
#endif

#if WORDS
typedef struct {
    const uint8_t *const *table; /* of the pixels that each tap reads */
    int64_t stride, taps;
} Taps;

/* The bytes of 32 channels that two taps of a pixel read, interleaved. */
INLINE void interleaved(const Taps *t, int64_t tap, int64_t m, int64_t c, __m256i *both) {
    const uint8_t *const *at = t->table + tap * t->stride + m;
    const __m256i first = _mm256_loadu_si256((const __m256i *)(at[0] + c));
    const __m256i second = _mm256_loadu_si256((const __m256i *)(at[tap + 1 < t->taps ? t->stride : 0] + c)); /* a missing tap has the weight 0 */
    both[0] = _mm256_unpacklo_epi8(first, second);
    both[1] = _mm256_unpackhi_epi8(first, second);
}

INLINE void filter_words(const int pixels, const Block *own, const int32_t *offset, const int8_t *w, const Taps *t, int64_t m, int64_t c,
                         __m256i (*sums)[4]) {
    const __m256i zero = _mm256_setzero_si256();
    for (int32_t i = 0; i < own->runs[0]; i++, offset++, w += 4 * FILTERS)
#pragma GCC unroll 2
        for (int p = 0; p < pixels; p++) {
            __m256i both[2];
            interleaved(t, *offset, m + p, c, both);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const __m256i x = j % 2 ? _mm256_unpackhi_epi8(both[j / 2], zero) : _mm256_unpacklo_epi8(both[j / 2], zero);
                sums[p][j] = _mm256_add_epi32(sums[p][j], _mm256_madd_epi16(x, _mm256_loadu_si256((const __m256i *)w + j)));
            }
        }
}

/* Finish the sums of 32 channels of a pixel, or of fewer. */
INLINE void store_filters(const Epilogue *e, int mode, int adds, int64_t c, int64_t channels, const __m256i *sums, const uint8_t *residual, void *output) {
    uint8_t added[FILTERS];
    __m256i values[4];
    if (adds) memcpy(added, residual, (size_t)least(channels, FILTERS));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const Lanes lanes = lanes_of(e, mode, adds, c + 4 * j, 16);
        __m128i r = _mm_setzero_si128();
        if (adds) r = _mm_unpacklo_epi32(_mm_loadu_si32(added + 4 * j), _mm_loadu_si32(added + 16 + 4 * j));
        values[j] = finished(e, &lanes, mode, adds, sums[j], r);
    }
    if (mode == SUM) {
        int32_t ordered[FILTERS];
        for (int j = 0; j < 4; j++) _mm256_storeu2_m128i((__m128i *)(ordered + 16 + 4 * j), (__m128i *)(ordered + 4 * j), values[j]);
        memcpy(output, ordered, (size_t)least(channels, FILTERS) * 4);
        return;
    }
    const __m256i bytes = _mm256_packus_epi16(limited(e, values[0], values[1]), limited(e, values[2], values[3]));
    if (channels >= FILTERS) _mm256_storeu_si256(output, bytes);
    else memcpy(output, &bytes, (size_t)channels);
}

/* The channels of a block, of `count` pixels of a row. */
INLINE void filter_block(const Sum *s, const Arranged *a, int64_t block, const Taps *t, int64_t count, int mode, int adds) {
    const Block *own = a->blocks + block;
    const int64_t c = block * FILTERS, channels = s->out_channels - c, size = mode == SUM ? 4 : 1, *places = places_of(s, t->table, t->stride);
    const int32_t *offsets = a->offsets + own->first;
    const int8_t *weights = a->weights + own->first * BYTES_OF_FILTERS;
    for (int64_t m = 0, pixels; m < count; m += pixels) {
        __m256i sums[2][4];
        pixels = m + 1 < count ? 2 : 1;
        for (int p = 0; p < 2; p++)
            for (int j = 0; j < 4; j++) sums[p][j] = eight_of(s->bias, c + 4 * j, 16);
        if (pixels == 2) filter_words(2, own, offsets, weights, t, m, c, sums);
        else filter_words(1, own, offsets, weights, t, m, c, sums);
        for (int p = 0; p < pixels; p++) {
            const int64_t at = places[m + p] + c;
            store_filters(&s->epilogue, mode, adds, c, channels, sums[p], s->residual + at, (uint8_t *)s->output + size * at);
        }
    }
}

/* Pixels of which a table says what each tap reads. */
static void filter_pixels(const Sum *s, const uint8_t *const *table, int64_t count) {
    const Arranged a = filters_at(s, (void *)s->weight);
    const Taps taps = {table, count, taps_of(s)};
#define FILTER(MODE, ADDS) for (int64_t block = 0; block < a.count; block++) filter_block(s, &a, block, &taps, count, MODE, ADDS)
    FOR_EACH_EPILOGUE(s, FILTER)
#undef FILTER
}

/* Pixels of a row, from `first` on. */
static void filter_part(const Sum *s, int64_t row, int64_t first, int64_t count, const uint8_t **table) {
    if (count <= 0) return;
    find_pixels(s, row * s->out_width + first, count, count, table);
    filter_pixels(s, table, count);
}

/* A row, of which `n` pixels side by side are one pixel of `one`, but for the edges, where taps are outside. */
static void filter_row(const Sum *s, const Sum *one, int64_t n, int64_t row, const uint8_t **table, const uint8_t **many) {
    const int64_t wide = (s->kernel_width - 1) * s->dilation_width, taps = taps_of(s), bytes = one->channels;
    const int64_t first = least(s->pad_width, s->out_width), last = least(s->out_width, s->width - wide + s->pad_width);
    const int64_t count = last > first ? (last - first) / n : 0, after = first + count * n;
    if (count > 0) {
        find_pixels(s, row * s->out_width + first, 1, 1, table);
        int64_t *places = (int64_t *)places_of(s, many, count), place = *places_of(s, table, 1);
        for (int64_t t = 0; t < taps; t++)
            for (int64_t i = 0; i < count; i++) many[t * count + i] = table[t] == s->outside ? one->outside : table[t] + i * bytes;
        for (int64_t i = 0; i < count; i++) places[i] = place + i * bytes;
        filter_pixels(one, many, count);
    }
    filter_part(s, row, 0, first, table);
    filter_part(s, row, after, s->out_width - after, table);
}
#endif

/* The weight is [tap][channels], int32, of which the upper halves are 0. */
void fxq_depthwise(const Sum *s) {
    int64_t channels = s->channels, rows = s->batch * s->out_depth * s->out_height;
#if !VNNI && !WORDS
    int64_t taps = taps_of(s);
    const int32_t *weight = s->weight;
#endif
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        const uint8_t **table = malloc(bytes_of_table(s, s->out_width));
        int32_t *sums = malloc((size_t)channels * sizeof *sums);
#if WORDS
        const int64_t n = beside(s);
        const uint8_t **many = malloc(bytes_of_table(s, s->out_width));
        const Beside own = beside_at(s, (char *)s->weight + bytes_of_arranged(s));
        const Sum one = as_one(s, &own);
#endif
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
#if WORDS
            (void)sums;
            if (n > 1) filter_row(s, &one, n, row, table, many);
            else filter_part(s, row, 0, s->out_width, table);
#else
            find_pixels(s, row * s->out_width, s->out_width, s->out_width, table);
#if VNNI
            (void)sums;
#define FILTER(MODE, ADDS) filter_row(s, table, MODE, ADDS)
            FOR_EACH_EPILOGUE(s, FILTER)
#else
            for (int64_t m = 0; m < s->out_width; m++) {
                for (int64_t c = 0; c < channels; c++) sums[c] = s->bias[c];
                for (int64_t t = 0; t < taps; t++) {
                    const uint8_t *p = table[t * s->out_width + m];
                    const int32_t *w = weight + t * channels;
                    for (int64_t c = 0; c < channels; c++) sums[c] += (int32_t)p[c] * (int16_t)w[c];
                }
                finish_row(s, sums, places_of(s, table, s->out_width)[m]);
            }
#endif
#endif
        }
#if WORDS
        free((void *)many);
#endif
        free((void *)table);
        free(sums);
    }
}

/* ---- what needs no weights ---- */

#if VNNI
/* The nearest integers to quotients, within limits; NaN is 0. */
INLINE __m512i nearest_of(__m512 v, __m512 scales, __m512 lows, __m512 highs) {
    v = _mm512_div_ps(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v), scales);
    return _mm512_cvt_roundps_epi32(_mm512_min_ps(_mm512_max_ps(v, lows), highs), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#endif

#if WORDS
/* Eight numbers that begin at x, or fewer, as integers within limits; NaN is 0. */
INLINE __m256i nearest_of(const float *x, int64_t count, float scale, float low, float high) {
    float own[8] = {0};
    if (count < 8) memcpy(own, x, (size_t)count * sizeof *own);
    __m256 v = _mm256_loadu_ps(count < 8 ? own : x);
    v = _mm256_div_ps(_mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)), _mm256_set1_ps(scale));
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, _mm256_set1_ps(low)), _mm256_set1_ps(high)));
}
#endif

/* float32, channels first, as bytes, channels last; channels beyond those of the input are `zero`. */
void fxq_quantize(const Move *s) {
    int64_t height = s->depth * s->height, area = height * s->width, width = s->out_channels;
#pragma omp parallel for collapse(2) num_threads(s->threads) if (s->threads > 1)
    for (int64_t image = 0; image < s->batch; image++)
        for (int64_t row = 0; row < height; row++) {
            const float *x = (const float *)s->input + image * s->channels * area + row * s->width;
            uint8_t *y = (uint8_t *)s->output + (image * area + row * s->width) * width;
            float low = (float)s->low, high = (float)s->high, scale = s->scale;
            int32_t zero = (int32_t)s->zero;
#if VNNI
            const __m512 lows = _mm512_set1_ps(low), highs = _mm512_set1_ps(high), scales = _mm512_set1_ps(scale);
            if (area == 1) {
                for (int64_t c = 0; c < width; c += 16) {
                    __m512 v = c < s->channels ? _mm512_maskz_loadu_ps(mask_of(s->channels - c), x + c) : _mm512_setzero_ps();
                    __m512i q = _mm512_add_epi32(_mm512_set1_epi32(zero), nearest_of(v, scales, lows, highs));
                    _mm512_mask_cvtepi32_storeu_epi8(y + c, mask_of(width - c), q);
                }
                continue;
            }
            if (width == 4) {
                for (int64_t i = 0; i < s->width; i += 16) {
                    __mmask16 mask = mask_of(s->width - i);
                    __m512i word = _mm512_setzero_si512();
                    for (int64_t k = 0; k < 4; k++) {
                        __m512i q = _mm512_set1_epi32(zero);
                        if (k < s->channels) {
                            __m512 v = _mm512_maskz_loadu_ps(mask, x + k * area + i);
                            q = _mm512_add_epi32(q, nearest_of(v, scales, lows, highs));
                        }
                        word = _mm512_or_si512(word, _mm512_sll_epi32(q, _mm_cvtsi64_si128(8 * k)));
                    }
                    _mm512_mask_storeu_epi32((int32_t *)y + i, mask, word);
                }
                continue;
            }
#endif
#if WORDS
            if (area == 1) {
                for (int64_t c = 0; c < width; c += 8) {
                    int64_t left = s->channels - c;
                    __m256i q = left > 0 ? nearest_of(x + c, left, scale, low, high) : _mm256_setzero_si256();
                    q = _mm256_packs_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(zero)), q);
                    q = _mm256_packus_epi16(q, q);
                    int32_t quads[2] = {_mm256_extract_epi32(q, 0), _mm256_extract_epi32(q, 4)};
                    memcpy(y + c, quads, 4);
                    if (width - c >= 8) memcpy(y + c + 4, quads + 1, 4); /* a width is a multiple of four */
                }
                continue;
            }
            if (width == 4) {
                for (int64_t i = 0; i < s->width; i += 8) {
                    __m256i word = _mm256_setzero_si256();
                    for (int64_t k = 0; k < 4; k++) {
                        __m256i q = _mm256_set1_epi32(zero);
                        if (k < s->channels) q = _mm256_add_epi32(q, nearest_of(x + k * area + i, s->width - i, scale, low, high));
                        word = _mm256_or_si256(word, _mm256_sll_epi32(q, _mm_cvtsi64_si128(8 * k)));
                    }
                    if (s->width - i >= 8) memcpy(y + 4 * i, &word, 32);
                    else memcpy(y + 4 * i, &word, (size_t)(s->width - i) * 4);
                }
                continue;
            }
#endif
            for (int64_t c = 0; c < width; c += 4) {
                int64_t here = s->channels - c;
                for (int64_t i = 0; i < s->width; i++) {
                    uint32_t word = 0;
                    for (int64_t k = 0; k < 4 && c + k < width; k++) {
                        int32_t q = zero;
                        if (k < here) {
                            float v = x[(c + k) * area + i];
                            v = v == v ? v / scale : 0.0f;
                            v = v < low ? low : v;
                            v = v > high ? high : v;
                            q += nearest(v);
                        }
                        word |= (uint32_t)(uint8_t)q << (8 * k);
                    }
                    memcpy(y + i * width + c, &word, (size_t)least(4, width - c));
                }
            }
        }
}

/* The largest byte of each window; padding never wins. */
void fxq_max_pool(const Move *s) {
    int64_t channels = s->channels, rows = s->batch * s->out_depth * s->out_height, lines = s->kernel_depth * s->kernel_height;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        const uint8_t **line = malloc((size_t)lines * sizeof *line);
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
            int64_t image = row / s->out_height / s->out_depth, front = row / s->out_height % s->out_depth * s->stride_depth - s->pad_depth;
            int64_t top = row % s->out_height * s->stride_height - s->pad_height, count = 0;
            for (int64_t i = 0; i < lines; i++) {
                int64_t plane = front + i / s->kernel_height * s->dilation_depth, at = top + i % s->kernel_height * s->dilation_height;
                if (plane >= 0 && plane < s->depth && at >= 0 && at < s->height)
                    line[count++] = (const uint8_t *)s->input + ((image * s->depth + plane) * s->height + at) * s->width * channels;
            }
            uint8_t *restrict y = (uint8_t *)s->output + row * s->out_width * channels;
            for (int64_t column = 0; column < s->out_width; column++, y += channels) {
                int64_t left = column * s->stride_width - s->pad_width;
#if VNNI
                for (int64_t c = 0; c < channels; c += 64) {
                    __mmask64 mask = channels - c >= 64 ? ~0ull : ~0ull >> (64 - (channels - c));
                    __m512i most = _mm512_setzero_si512();
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t j = 0, x = left; j < s->kernel_width; j++, x += s->dilation_width)
                            if (x >= 0 && x < s->width) most = _mm512_max_epu8(most, _mm512_maskz_loadu_epi8(mask, line[i] + x * channels + c));
                    _mm512_mask_storeu_epi8(y + c, mask, most);
                }
#else
                int64_t begin = 0;
#if WORDS
                for (; begin + 32 <= channels; begin += 32) {
                    __m256i most = _mm256_setzero_si256();
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t j = 0, x = left; j < s->kernel_width; j++, x += s->dilation_width)
                            if (x >= 0 && x < s->width)
                                most = _mm256_max_epu8(most, _mm256_loadu_si256((const __m256i *)(line[i] + x * channels + begin)));
                    _mm256_storeu_si256((__m256i *)(y + begin), most);
                }
#endif
                memset(y + begin, 0, (size_t)(channels - begin));
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0, x = left; j < s->kernel_width; j++, x += s->dilation_width)
                        if (x >= 0 && x < s->width)
                            for (int64_t c = begin; c < channels; c++) y[c] = y[c] > line[i][x * channels + c] ? y[c] : line[i][x * channels + c];
#endif
            }
        }
        free((void *)line);
    }
}

#if WORDS
enum { PARTS = 8, WIDTH = 3 }; /* parts of half a table, of 16 bytes each; vectors side by side */

/* A table as sixteen parts, but for the first of each half the difference to the part before it. Shuffles give 0 for a negative index, so
   the differences up to the part of a byte remain, and these are that part. */
INLINE void differences_of(const uint8_t *table, __m256i *parts) {
    for (int i = 0; i < 2 * PARTS; i++) {
        __m128i part = _mm_loadu_si128((const __m128i *)table + i);
        if (i % PARTS) part = _mm_xor_si128(part, _mm_loadu_si128((const __m128i *)table + i - 1));
        parts[i] = _mm256_broadcastsi128_si256(part);
    }
}

INLINE void shuffled(const __m256i *parts, const int vectors, const uint8_t *x, uint8_t *y) {
    const __m256i sixteen = _mm256_set1_epi8(16), half = _mm256_set1_epi8((char)128);
    __m256i at[WIDTH], found[WIDTH];
#pragma GCC unroll 3
    for (int v = 0; v < vectors; v++) at[v] = _mm256_loadu_si256((const __m256i *)x + v), found[v] = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int i = 0; i < 2 * PARTS; i++) {
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            if (i == PARTS) at[v] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)x + v), half);
            found[v] = _mm256_xor_si256(found[v], _mm256_shuffle_epi8(parts[i], at[v]));
            at[v] = _mm256_subs_epi8(at[v], sixteen);
        }
    }
#pragma GCC unroll 3
    for (int v = 0; v < vectors; v++) _mm256_storeu_si256((__m256i *)y + v, found[v]);
}

static void look_up(const uint8_t *table, const uint8_t *x, uint8_t *y, int64_t size, int64_t threads) {
    const int64_t together = 32 * WIDTH, whole = size / together;
    __m256i parts[2 * PARTS];
    differences_of(table, parts);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i++) shuffled(parts, WIDTH, x + i * together, y + i * together);
    for (int64_t i = whole * together; i < size; i++) y[i] = table[x[i]];
}
#endif

enum { BESIDE = 32 }; /* channels whose tables stay in the nearest cache */

/* Of each channel, the table of its z. */
static void look_up_channels(const uint8_t *table, const uint8_t *z, const uint8_t *x, uint8_t *restrict y, int64_t pixels, int64_t channels) {
    for (int64_t c = 0; c < channels; c += BESIDE) {
        int64_t count = least(BESIDE, channels - c);
        const uint8_t *of[BESIDE];
        for (int64_t i = 0; i < count; i++) of[i] = table + 256 * z[c + i];
        for (int64_t p = 0; p < pixels; p++)
            for (int64_t i = 0; i < count; i++) y[p * channels + c + i] = of[i][x[p * channels + c + i]];
    }
}

/* table[x] of `batch` pixels; with `out_height` = 1, every channel has a table of its own. */
void fxq_lookup(const Move *s) {
    int64_t channels = s->channels;
    const uint8_t *table = s->table;
    if (s->out_height) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
        for (int64_t pixel = 0; pixel < s->batch; pixel++) {
            const uint8_t *x = (const uint8_t *)s->input + pixel * channels;
            uint8_t *restrict y = (uint8_t *)s->output + pixel * channels;
            const uint8_t *of = table;
            for (int64_t c = 0; c < channels; c++, of += 256) y[c] = of[x[c]];
        }
        return;
    }
#if WORDS
    look_up(table, s->input, s->output, s->batch * channels, s->threads);
#else
#if VNNI && defined(__AVX512VBMI__)
    __m512i part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm512_loadu_si512(table + 64 * i);
#endif
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int64_t pixel = 0; pixel < s->batch; pixel++) {
        const uint8_t *x = (const uint8_t *)s->input + pixel * channels;
        uint8_t *restrict y = (uint8_t *)s->output + pixel * channels;
#if VNNI && defined(__AVX512VBMI__)
        for (int64_t c = 0; c < channels; c += 64) {
            __mmask64 mask = channels - c >= 64 ? ~0ull : ~0ull >> (64 - (channels - c));
            __m512i at = _mm512_maskz_loadu_epi8(mask, x + c);
            __m512i low = _mm512_permutex2var_epi8(part[0], at, part[1]), high = _mm512_permutex2var_epi8(part[2], at, part[3]);
            _mm512_mask_storeu_epi8(y + c, mask, _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high));
        }
#else
        for (int64_t c = 0; c < channels; c++) y[c] = table[x[c]];
#endif
    }
#endif
}

/* table[256 * x + z]; where z has one pixel for each image of x, which is `out_height` = 1, table[256 * z + x]. */
void fxq_pairs(const Move *s) {
    const uint8_t *table = s->table;
    int64_t pixels = s->depth * s->height * s->width, channels = s->channels;
    int64_t parts = s->out_height ? least(pixels, s->threads) : pixels, part = (pixels + parts - 1) / (parts ? parts : 1);
#pragma omp parallel for collapse(2) num_threads(s->threads) if (s->threads > 1)
    for (int64_t image = 0; image < s->batch; image++)
        for (int64_t i = 0; i < parts; i++) {
            int64_t first = (image * pixels + i * part) * channels, count = least(part, pixels - i * part);
            const uint8_t *x = (const uint8_t *)s->input + first, *z = s->other + (s->out_height ? image * channels : first);
            uint8_t *restrict y = (uint8_t *)s->output + first;
            if (s->out_height) look_up_channels(table, z, x, y, count, channels);
            else for (int64_t c = 0; c < channels; c++) y[c] = table[256 * x[c] + z[c]];
        }
}

/* ---- a linear layer whose operand becomes bytes on a grid of its own ---- */

typedef int32_t __attribute__((may_alias)) accumulator;

typedef struct {
    Sum sum;             /* of one pixel for each row, with the mode SUM and no bias */
    const float *input;  /* rows of `inputs` numbers, without gaps */
    float *output;       /* rows of sum.out_channels numbers */
    const int32_t *totals; /* of the weights of each output channel */
    const float *scale, *bias;
    int64_t inputs;
    float smallest, largest; /* magnitudes: what is smaller is 0, and what is larger is this */
} Dynamic;

/* float32(Σ (q - zero)·w) · (s_x · scale) + bias, where q, zero and s_x are those of the operand's range: ARITHMETIC.md has the formula. */
void fxq_dynamic(const Dynamic *d) {
#if VNNI
    int64_t rows = d->sum.batch, inputs = d->inputs, pixel = d->sum.channels, outputs = d->sum.out_channels, count = rows * inputs;
    int64_t threads = count > 65536 ? d->sum.threads : 1;
    const __m512 smallest = _mm512_set1_ps(d->smallest), ends = _mm512_set1_ps(d->largest), zeros = _mm512_setzero_ps();
    const __m512 negative = _mm512_sub_ps(zeros, ends);
#define OPERAND(MASK, AT) \
    ({ \
        __m512 value = _mm512_maskz_loadu_ps(MASK, AT); \
        value = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(value), smallest, _CMP_GE_OQ), value); \
        _mm512_min_ps(_mm512_max_ps(value, negative), ends); \
    })
    __m512 lows = zeros, highs = zeros;
    for (int64_t i = 0; i < count; i += 16) {
        __m512 v = OPERAND(mask_of(count - i), d->input + i);
        lows = _mm512_min_ps(lows, v);
        highs = _mm512_max_ps(highs, v);
    }
    float low = _mm512_reduce_min_ps(lows), high = _mm512_reduce_max_ps(highs);
    float step = high == low ? 1.0f : (high - low) / 255.0f;
    float zero = 0.0f - low / step;
    zero = zero < 0.0f ? 0.0f : zero > 255.0f ? 255.0f : zero;
    int32_t zero_point = nearest(zero);
    uint8_t *bytes = malloc((size_t)(rows * pixel + 64));
    int64_t padded = (outputs + 15) / 16 * 16;
    int32_t *bias = malloc((size_t)padded * 4);
    float *factor = malloc((size_t)padded * 4);
    for (int64_t c = 0; c < padded; c++) {
        bias[c] = c < outputs ? -zero_point * d->totals[c] : 0; /* sums of 32 bits are right modulo 2^32 */
        factor[c] = c < outputs ? step * d->scale[c] : 0.0f;
    }
    const __m512 steps = _mm512_set1_ps(step), least_q = _mm512_set1_ps((float)-zero_point), most_q = _mm512_set1_ps((float)(255 - zero_point));
    const __m512i moved = _mm512_set1_epi32(zero_point);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < pixel; i += 16) {
            __m512 v = _mm512_div_ps(OPERAND(mask_of(inputs - i), d->input + row * inputs + i), steps);
            v = _mm512_min_ps(_mm512_max_ps(v, least_q), most_q);
            __m512i q = _mm512_add_epi32(moved, _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            _mm512_mask_cvtepi32_storeu_epi8(bytes + row * pixel + i, mask_of(pixel - i), q);
        }
    Sum sum = d->sum;
    set_one_pixel(&sum);
    sum.input = sum.outside = bytes;
    sum.bias = bias;
    sum.output = d->output;
    fxq_convolution(&sum);
    threads = rows * outputs > 65536 ? d->sum.threads : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        accumulator *total = (accumulator *)(d->output + row * outputs);
        for (int64_t c = 0; c < outputs; c += 16) {
            __mmask16 mask = mask_of(outputs - c);
            __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(mask, total + c)), _mm512_loadu_ps(factor + c));
            if (d->bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, d->bias + c));
            _mm512_mask_storeu_ps(d->output + row * outputs + c, mask, v);
        }
    }
    free(bytes);
    free(bias);
    free(factor);
#else
    (void)d;
#endif
}

/* ---- constants that are watched for changes ---- */

typedef struct {
    const uint8_t *const *starts;
    const int64_t *sizes;
    uint64_t *known;              /* the checksum of each span */
    int64_t always, count, next;  /* the first spans are for every call, those after them by turns, `next` the first of them */
    int64_t remember, everything; /* whether checksums are written down, and whether all spans are compared */
    int64_t changed;              /* written: whether a span was found to have another checksum */
} Watch;

#define STREAMS 32

static uint64_t checksum(const uint8_t *start, int64_t size) { /* every step is a bijection of a stream, so no single change is lost */
    uint64_t streams[STREAMS], word, result = (uint64_t)size;
    for (int lane = 0; lane < STREAMS; lane++) streams[lane] = lane;
    int64_t at = 0, streamed = size / (8 * STREAMS);
    for (; at + 8 * STREAMS <= size; at += 8 * STREAMS) {
        uint64_t words[STREAMS];
        memcpy(words, start + at, sizeof words);
        for (int lane = 0; lane < STREAMS; lane++) {
            uint64_t mixed = streams[lane] ^ words[lane];
            streams[lane] = (mixed << 23 | mixed >> 41) + lane;
        }
    }
    for (int lane = 0; streamed && lane < STREAMS; lane++) {
        result = (result ^ streams[lane]) * 0x9E3779B97F4A7C15u;
        result ^= result >> 29;
    }
    for (; at < size; at += 8) {
        word = 0;
        memcpy(&word, start + at, (size_t)least(8, size - at));
        result = (result ^ word) * 0x9E3779B97F4A7C15u;
        result ^= result >> 29;
    }
    return result;
}

static int differs(Watch *s, int64_t span) {
    uint64_t found = checksum(s->starts[span], s->sizes[span]);
    if (s->remember) s->known[span] = found;
    return found != s->known[span];
}

void fxq_watch(Watch *s) {
    int all = s->remember || s->everything;
    s->changed = 0;
    for (int64_t span = 0; span < (all ? s->count : s->always); span++) s->changed |= differs(s, span);
    if (all || s->always == s->count) return;
    s->changed |= differs(s, s->next);
    s->next = s->next + 1 < s->count ? s->next + 1 : s->always;
}
