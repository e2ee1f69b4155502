/* Chains of elementwise primitives in one pass over memory: steps on registers, as fxquant/primitives/steps.py describes them. A register
   holds a lane of each of BLOCK elements, which lie side by side in the result. Lanes are int32, or int64 where a chain needs them; this
   file includes itself for both. Registers of float32 numbers have the same memory. Steps name registers by the place of their first lane.

   Recurrences, as straight programs of the same steps and four more, on registers that hold some columns of each of a few rows: no row
   of a batch depends on another one. */

#ifndef LANE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

enum { BLOCK = 512, DIMS = 8 };
enum { ADD, SUBTRACT, MULTIPLY, SHIFT, LEAST, LARGEST, CLIP, LOOK_UP, ROUND, SCALE, TOTAL, LOWEST, HIGHEST, AFFINE, READ, WRITE, PART, SPREAD, SUM };
enum { BYTE, INT8, INT16, INT32, INT64, FLOAT };

typedef struct {
    int64_t op, to, a, b, low, high, columns; /* columns: of the result's rows */
    const void *table;
} Step;

typedef struct {
    const Step *steps;
    const int64_t *registers, *kinds, *offsets; /* of operands: where they go, their dtypes, and what is subtracted; the result's last */
    const int64_t *sizes, *strides;             /* sizes: of the result, DIMS, the innermost last; strides: in elements, DIMS of each tensor */
    void *const *data;                          /* of operands and of the result, in this order */
    int64_t operands, count, used, wide, threads;
} Chain;

typedef struct {
    const Step *steps;
    const int64_t *moves;  /* of each READ and WRITE, MOVE numbers: the tensor, its dtype, the strides of columns and of repeats, what is subtracted */
    const int64_t *places; /* of each READ and WRITE, the first element of every row */
    void *const *data;     /* of tensors */
    const void *constants; /* the registers before `fixed`: one row, which all rows read */
    int64_t rows, most, fixed, used, depth, count, wide, threads; /* most: rows at once; used: columns of all other registers; depth: of sums */
    int64_t once, repeats; /* once: the steps that run first; the others are repeated */
} Program;

enum { MOVE = 5, WIDE = 4 }; /* WIDE: rows whose sums are computed together */

/* Sums of products of int16 pairs with int8 weights, of LANES columns. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { LANES = 16 };
typedef __m512i Sums;
static inline Sums weights(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w)); }
static inline Sums add_products(Sums s, Sums w, int32_t pair) { return _mm512_dpwssd_epi32(s, w, _mm512_set1_epi32(pair)); }
#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8 };
typedef __m256i Sums;
static inline Sums weights(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w)); }
static inline Sums add_products(Sums s, Sums w, int32_t pair) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(w, _mm256_set1_epi32(pair)));
}
#else
enum { LANES = 8 };
typedef struct { int32_t of[LANES]; } Sums;
typedef struct { int16_t of[2 * LANES]; } Weights;
static inline Weights weights(const int8_t *w) {
    Weights v;
    for (int i = 0; i < 2 * LANES; i++) v.of[i] = w[i];
    return v;
}
static inline Sums add_products(Sums s, Weights w, int32_t pair) {
    int16_t x[2];
    memcpy(x, &pair, sizeof x);
    for (int i = 0; i < LANES; i++) s.of[i] += w.of[2 * i] * x[0] + w.of[2 * i + 1] * x[1];
    return s;
}
#endif
enum { COLUMNS = 64, VECTORS = COLUMNS / LANES }; /* computed together; weights: (columns / COLUMNS, depth, COLUMNS, 2), depth in pairs */

static inline __attribute__((always_inline)) void sum_tile(const int rows, const int32_t *x, const int8_t *w, int64_t depth, int32_t *y) {
    Sums s[WIDE][VECTORS];
    memset(s, 0, sizeof s);
    for (int64_t k = 0; k < depth; k++, w += 2 * COLUMNS)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const __auto_type factor = weights(w + 2 * LANES * v);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) s[r][v] = add_products(s[r][v], factor, x[r * depth + k]);
        }
    memcpy(y, s, (size_t)rows * COLUMNS * sizeof *y);
}

static inline float nearest_even(float value) { return __builtin_rintf(value); }

#if defined(__AVX2__) && !defined(__AVX512F__)
/* (a · factor + summand) >> shift within limits, of a vector. Products of words, of 16 bits, take one instruction. */
enum { ONE, WORDS, WHOLE };
typedef struct {
    __m256i factor, summand, low, high;
    __m128i shift;
} Stage;

static inline Stage stage_of(const int64_t *c) {
    return (Stage){_mm256_set1_epi32((int32_t)c[0]), _mm256_set1_epi32((int32_t)c[1]), _mm256_set1_epi32((int32_t)c[3]),
                   _mm256_set1_epi32((int32_t)c[4]), _mm_cvtsi32_si128((int32_t)c[2])};
}

static inline __m256i staged(const Stage *s, int multiplies, __m256i v) {
    if (multiplies) v = multiplies == WORDS ? _mm256_madd_epi16(v, s->factor) : _mm256_mullo_epi32(v, s->factor);
    v = _mm256_sra_epi32(_mm256_add_epi32(v, s->summand), s->shift);
    return _mm256_min_epi32(_mm256_max_epi32(v, s->low), s->high);
}

/* Two stages, of which the second multiplies words by 15 bits; return how many of `n` numbers were computed. */
static int64_t two_stages(const int64_t *c, int32_t *y, const int32_t *a, int64_t n) {
    if (c[3] < INT16_MIN || c[4] > INT16_MAX || c[5] < 0 || c[5] > INT16_MAX) return 0;
    const Stage one = stage_of(c), two = stage_of(c + 5);
    int64_t i = 0;
#define STAGES(HOW)                                                                                                                   \
    for (; i + 8 <= n; i += 8)                                                                                                        \
        _mm256_storeu_si256((__m256i *)(y + i), staged(&two, WORDS, staged(&one, HOW, _mm256_loadu_si256((const __m256i *)(a + i)))))
    if (c[0] == 1) STAGES(ONE);
    else STAGES(WHOLE);
#undef STAGES
    return i;
}
#endif

#define LANE int32_t
#define NAMED(NAME) NAME##_32
#include __FILE__
#undef LANE
#undef NAMED
#define LANE int64_t
#define NAMED(NAME) NAME##_64
#include __FILE__

void fxq_chain(const Chain *c) { c->wide ? run_64(c) : run_32(c); }
void fxq_program(const Program *p) { p->wide ? program_64(p) : program_32(p); }

#else

#define LOAD(TYPE)                                                                                          \
    do {                                                                                                    \
        const TYPE *restrict x = (const TYPE *)data + at;                                                   \
        if (stride == 1) for (int64_t i = 0; i < n; i++) r[i] = (LANE)x[i] - offset;                        \
        else if (stride == 0) for (int64_t i = 0; i < n; i++) r[i] = (LANE)*x - offset;                     \
        else for (int64_t i = 0; i < n; i++) r[i] = (LANE)x[i * stride] - offset;                           \
    } while (0)

static void NAMED(load)(LANE *restrict r, const void *data, int64_t kind, int64_t at, int64_t stride, int64_t n, LANE offset) {
    switch (kind) {
        case BYTE: LOAD(uint8_t); break;
        case INT8: LOAD(int8_t); break;
        case INT16: LOAD(int16_t); break;
        case INT32: LOAD(int32_t); break;
        case INT64: LOAD(int64_t); break;
        default: {
            const float *restrict x = (const float *)data + at;
            float *restrict f = (float *)r;
            for (int64_t i = 0; i < n; i++) f[i] = x[i * stride];
        }
    }
}

#define STORE(TYPE)                                                                                         \
    do {                                                                                                    \
        TYPE *restrict y = (TYPE *)data + at;                                                               \
        if (stride == 1) for (int64_t i = 0; i < n; i++) y[i] = (TYPE)r[i];                                 \
        else for (int64_t i = 0; i < n; i++) y[i * stride] = (TYPE)r[i];                                    \
    } while (0)

static void NAMED(store)(const LANE *restrict r, void *data, int64_t kind, int64_t at, int64_t stride, int64_t n) {
    switch (kind) {
        case BYTE: STORE(uint8_t); break;
        case INT8: STORE(int8_t); break;
        case INT16: STORE(int16_t); break;
        case INT32: STORE(int32_t); break;
        case INT64: STORE(int64_t); break;
        default: {
            const float *restrict f = (const float *)r;
            float *restrict y = (float *)data + at;
            for (int64_t i = 0; i < n; i++) y[i * stride] = f[i];
        }
    }
}

#define EACH(EXPRESSION) for (int64_t i = 0; i < n; i++) y[i] = EXPRESSION

typedef struct { LANE factor, summand, shift, low, high; } NAMED(Affine);

static inline NAMED(Affine) NAMED(affine_of)(const int64_t *c) {
    return (NAMED(Affine)){(LANE)c[0], (LANE)c[1], (LANE)c[2], (LANE)c[3], (LANE)c[4]};
}
static inline LANE NAMED(limited)(LANE v, LANE low, LANE high) { return v < low ? low : v > high ? high : v; }
static inline LANE NAMED(affine)(const NAMED(Affine) *s, LANE v) {
    return NAMED(limited)((v * s->factor + s->summand) >> s->shift, s->low, s->high);
}

static void NAMED(step)(const Step *s, LANE *y, const LANE *a, const LANE *b, int64_t n) {
    const float *f = (const float *)b;
    LANE low = (LANE)s->low, high = (LANE)s->high;
    switch (s->op) {
        case ADD: EACH(a[i] + b[i]); break;
        case SUBTRACT: EACH(a[i] - b[i]); break;
        case MULTIPLY: EACH(a[i] * b[i]); break;
        case SHIFT: EACH(a[i] >> b[i]); break;
        case LEAST: EACH(a[i] < b[i] ? a[i] : b[i]); break;
        case LARGEST: EACH(a[i] > b[i] ? a[i] : b[i]); break;
        case CLIP: EACH(NAMED(limited)(a[i], low, high)); break;
        case LOOK_UP: /* high: whether the table is int16, which takes less of the cache, or int32 */
            if (s->high) EACH(((const int16_t *)s->table)[a[i] - low]);
            else EACH(((const int32_t *)s->table)[a[i] - low]);
            break;
        case AFFINE: {
            const NAMED(Affine) one = NAMED(affine_of)(s->table), two = NAMED(affine_of)((const int64_t *)s->table + 5 * (s->low - 1));
#if defined(__AVX2__) && !defined(__AVX512F__)
            if (s->low == 2 && sizeof(LANE) == 4) {
                const int64_t done = two_stages(s->table, (int32_t *)y, (const int32_t *)a, n);
                y += done, a += done, n -= done;
            }
#endif
            if (s->low == 2 && one.factor == 1) EACH(NAMED(affine)(&two, NAMED(limited)((a[i] + one.summand) >> one.shift, one.low, one.high)));
            else if (s->low == 2) EACH(NAMED(affine)(&two, NAMED(affine)(&one, a[i])));
            else if (one.factor == 1) EACH(NAMED(limited)((a[i] + one.summand) >> one.shift, one.low, one.high));
            else EACH(NAMED(affine)(&one, a[i]));
            break;
        }
        case ROUND:
            for (int64_t i = 0; i < n; i++) {
                float v = nearest_even((float)a[i] * f[i]);
                v = v < (float)s->low ? (float)s->low : v;
                y[i] = (LANE)(int32_t)(v > (float)s->high ? (float)s->high : v);
            }
            break;
        default: {
            float *g = (float *)y;
            for (int64_t i = 0; i < n; i++) g[i] = (float)a[i] * f[i];
        }
    }
}

static void NAMED(run)(const Chain *c) {
    int64_t rows = 1, inner = c->sizes[DIMS - 1];
    for (int d = 0; d < DIMS - 1; d++) rows *= c->sizes[d];
    int64_t parts = (inner + BLOCK - 1) / BLOCK, jobs = rows * parts;
#pragma omp parallel num_threads(c->threads) if (c->threads > 1 && jobs > 8)
    {
        LANE *r = aligned_alloc(64, (size_t)c->used * sizeof(LANE));
        for (int64_t k = 0; k < c->operands; k++) {
            int64_t moves = 0;
            for (int d = 0; d < DIMS; d++) moves |= c->strides[k * DIMS + d];
            if (!moves) NAMED(load)(r + c->registers[k], c->data[k], c->kinds[k], 0, 0, BLOCK, (LANE)c->offsets[k]);
        }
#pragma omp for
        for (int64_t job = 0; job < jobs; job++) {
            int64_t index[DIMS], rest = job / parts, first = job % parts * BLOCK, n = inner - first < BLOCK ? inner - first : BLOCK;
            for (int d = DIMS - 2; d >= 0; d--) index[d] = rest % c->sizes[d], rest /= c->sizes[d];
            index[DIMS - 1] = first;
            for (int64_t k = 0; k <= c->operands; k++) {
                const int64_t *strides = c->strides + k * DIMS;
                int64_t at = 0, moves = 0;
                for (int d = 0; d < DIMS; d++) at += index[d] * strides[d], moves |= strides[d];
                if (k < c->operands) {
                    if (moves) NAMED(load)(r + c->registers[k], c->data[k], c->kinds[k], at, strides[DIMS - 1], n, (LANE)c->offsets[k]);
                    continue;
                }
                for (const Step *s = c->steps; s < c->steps + c->count; s++) NAMED(step)(s, r + s->to, r + s->a, r + s->b, n);
                NAMED(store)(r + c->registers[k], c->data[k], c->kinds[k], at, strides[DIMS - 1], n);
            }
        }
        free(r);
    }
}

/* y (rows, columns) = bias + x (rows, `s->high`) · weight. */
static void NAMED(sum)(const Step *s, LANE *y, const LANE *x, const LANE *bias, int64_t rows, int32_t *pairs) {
    int64_t depth = (s->high + 1) / 2;
    int16_t *narrow = (int16_t *)pairs;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < s->high; i++) narrow[2 * depth * r + i] = (int16_t)x[r * s->high + i];
        if (s->high % 2) narrow[2 * depth * r + s->high] = 0;
    }
    for (int64_t first = 0; first < s->columns; first += COLUMNS) {
        int32_t part[WIDE * COLUMNS];
        const int8_t *w = (const int8_t *)s->table + first * depth * 2;
        int64_t n = s->columns - first < COLUMNS ? s->columns - first : COLUMNS;
        for (int64_t r = 0, more; r < rows; r += more) {
            more = rows - r >= WIDE ? WIDE : 1;
            more == WIDE ? sum_tile(WIDE, pairs + r * depth, w, depth, part) : sum_tile(1, pairs + r * depth, w, depth, part);
            for (int64_t j = 0; j < more; j++)
                for (int64_t i = 0; i < n; i++) y[(r + j) * s->columns + first + i] = part[j * COLUMNS + i] + bias[first + i];
        }
    }
}

/* One column as many, or many as one: their sum, the smallest, or the largest. */
static void NAMED(across)(const Step *s, LANE *restrict y, const LANE *restrict a, int64_t rows) {
    int64_t n = s->op == SPREAD ? s->columns : s->high;
    for (int64_t r = 0; r < rows; r++, s->op == SPREAD ? (y += n, a++) : (y++, a += n)) {
        LANE v = *a;
        if (s->op == SPREAD) for (int64_t i = 0; i < n; i++) y[i] = v;
        else if (s->op == TOTAL) for (int64_t i = 1; i < n; i++) v += a[i];
        else if (s->op == LOWEST) for (int64_t i = 1; i < n; i++) v = a[i] < v ? a[i] : v;
        else for (int64_t i = 1; i < n; i++) v = a[i] > v ? a[i] : v;
        if (s->op != SPREAD) *y = v;
    }
}

static void NAMED(program)(const Program *p) {
    const LANE *constants = p->constants;
    int64_t jobs = (p->rows + p->most - 1) / p->most;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1 && jobs > 1)
    {
        LANE *own = aligned_alloc(64, (size_t)(p->used * p->most * (int64_t)sizeof(LANE) / 64 + 1) * 64);
        int32_t *pairs = aligned_alloc(64, (size_t)(p->depth * p->most / 16 + 1) * 64);
#pragma omp for
        for (int64_t job = 0; job < jobs; job++) {
            int64_t first = job * p->most, rows = p->rows - first < p->most ? p->rows - first : p->most;
            for (int64_t t = -1; t < p->repeats; t++)
            for (const Step *s = p->steps + (t < 0 ? 0 : p->once); s < p->steps + (t < 0 ? p->once : p->count); s++) {
                const int a_fixed = s->a < p->fixed, b_fixed = s->b < p->fixed;
                LANE *y = own + (s->to - p->fixed) * p->most;
                const LANE *a = a_fixed ? constants + s->a : own + (s->a - p->fixed) * p->most;
                const LANE *b = b_fixed ? constants + s->b : own + (s->b - p->fixed) * p->most;
                const int moves = s->op == READ || s->op == WRITE;
                const int64_t *m = p->moves + (moves ? MOVE * s->low : 0), *places = p->places + (moves ? p->rows * s->low : 0) + first;
                const int64_t on = t < 0 ? 0 : t * m[3];
                if (s->op == SPREAD || (s->op >= TOTAL && s->op <= HIGHEST)) NAMED(across)(s, y, a, rows);
                else if (s->op == SUM) NAMED(sum)(s, y, a, b, rows, pairs);
                else if (s->op < READ && !a_fixed && !b_fixed) NAMED(step)(s, y, a, b, rows * s->columns);
                else for (int64_t r = 0; r < rows; r++) {
                    int64_t at = r * s->columns;
                    if (s->op == READ) NAMED(load)(y + at, p->data[m[0]], m[1], places[r] + on, m[2], s->columns, (LANE)m[4]);
                    else if (s->op == WRITE) NAMED(store)(a + at, p->data[m[0]], m[1], places[r] + on, m[2], s->columns);
                    else if (s->op == PART) memcpy(y + at, a + r * s->high + s->low, (size_t)s->columns * sizeof(LANE));
                    else NAMED(step)(s, y + at, a_fixed ? a : a + at, b_fixed ? b : b + at, s->columns);
                }
            }
        }
        free(own);
        free(pairs);
    }
}

#undef LOAD
#undef STORE
#undef EACH
#endif
