/* Chains of elementwise primitives in one pass over memory: steps on registers, as fxquant/primitives/steps.py describes them. A register
   holds a lane of each of BLOCK elements, which lie side by side in the result. Lanes are int32, or int64 where a chain needs them; this
   file includes itself for both. Registers of float32 numbers have the same memory. */

#ifndef LANE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 512, DIMS = 8 };
enum { ADD, SUBTRACT, MULTIPLY, SHIFT, LEAST, LARGEST, CLIP, LOOK_UP, ROUND, SCALE };
enum { BYTE, INT8, INT16, INT32, INT64, FLOAT };

typedef struct {
    int64_t op, to, a, b, low, high;
    const int32_t *table;
} Step;

typedef struct {
    const Step *steps;
    const int64_t *registers, *kinds, *offsets; /* of operands: where they go, their dtypes, and what is subtracted; the result's last */
    const int64_t *sizes, *strides;             /* sizes: of the result, DIMS, the innermost last; strides: in elements, DIMS of each tensor */
    void *const *data;                          /* of operands and of the result, in this order */
    int64_t operands, count, used, wide, threads;
} Chain;

static inline float nearest_even(float value) { return __builtin_rintf(value); }

#define LANE int32_t
#define NAMED(NAME) NAME##_32
#include __FILE__
#undef LANE
#undef NAMED
#define LANE int64_t
#define NAMED(NAME) NAME##_64
#include __FILE__

void fxq_chain(const Chain *c) { c->wide ? run_64(c) : run_32(c); }

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

static void NAMED(step)(const Step *s, LANE (*r)[BLOCK], int64_t n) {
    LANE *y = r[s->to];
    const LANE *a = r[s->a], *b = r[s->b];
    const float *f = (const float *)b;
    LANE low = (LANE)s->low, high = (LANE)s->high;
    switch (s->op) {
        case ADD: EACH(a[i] + b[i]); break;
        case SUBTRACT: EACH(a[i] - b[i]); break;
        case MULTIPLY: EACH(a[i] * b[i]); break;
        case SHIFT: EACH(a[i] >> b[i]); break;
        case LEAST: EACH(a[i] < b[i] ? a[i] : b[i]); break;
        case LARGEST: EACH(a[i] > b[i] ? a[i] : b[i]); break;
        case CLIP:
            for (int64_t i = 0; i < n; i++) {
                LANE v = a[i] < low ? low : a[i];
                y[i] = v > high ? high : v;
            }
            break;
        case LOOK_UP: EACH(s->table[a[i] - low]); break;
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
        LANE(*r)[BLOCK] = aligned_alloc(64, (size_t)c->used * BLOCK * sizeof(LANE));
        for (int64_t k = 0; k < c->operands; k++) {
            int64_t moves = 0;
            for (int d = 0; d < DIMS; d++) moves |= c->strides[k * DIMS + d];
            if (!moves) NAMED(load)(r[c->registers[k]], c->data[k], c->kinds[k], 0, 0, BLOCK, (LANE)c->offsets[k]);
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
                    if (moves) NAMED(load)(r[c->registers[k]], c->data[k], c->kinds[k], at, strides[DIMS - 1], n, (LANE)c->offsets[k]);
                    continue;
                }
                for (int64_t s = 0; s < c->count; s++) NAMED(step)(c->steps + s, r, n);
                NAMED(store)(r[c->registers[k]], c->data[k], c->kinds[k], at, strides[DIMS - 1], n);
            }
        }
        free(r);
    }
}

#undef LOAD
#undef STORE
#undef EACH
#endif
