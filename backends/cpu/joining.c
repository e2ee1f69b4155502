/* What training computes of two float tensors whose elements are integers, element by element, and its requantization: in one
   pass over memory each, without the accumulators. The words are those of fxquant/training/fused_elementwise.py, which says what each function gives.

   The accumulator of an element is a product, a * b, or a sum, of terms that are brought to a common scale; and a constant. It is an
   integer below 2^53, in float64. The elements are rows of columns; what is smaller than `a` is read again in other rows, or
   columns. Sums of gradients are formed in BLOCKS parts and joined in order, so that the number of threads changes nothing. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { REAL = 1, FIXED = 2, BLOCKS = 16, COLUMNS = 1024 };
enum { PRODUCT = 0, DOWN = 1, NEAREST = 2 }; /* sums: how a term is rounded */

typedef struct {
    const float *a, *b;
    const double *c;                      /* what is added, or NULL */
    const float *multiplier;              /* REAL: clip(rint(float(acc) * multiplier)) */
    const double *half, *first, *product; /* FIXED: floor(clip(floor((acc + half) * first)) * product + add) */
    const double *ratio;                  /* the real number of one step of the accumulator */
    const float *of_integers, *of_real;   /* gradients of what `forward` writes; either may be absent */
    float *integers, *real, *of_a, *of_b;
    uint8_t *inside;                      /* whether an element has a gradient */
    double *totals;                       /* (2, columns): the sums of the gradients of c, and of b, of every column */
    double *ends;                         /* the least and the largest accumulator */
    const uint8_t *mask;
    int64_t rows, columns, b_rows, b_stride, b_step, c_rows, c_stride, c_step;
    int64_t kind, mode, wide, each;       /* wide: real numbers in float64; each: constants of every column, not of all */
    int64_t outside, threads;             /* outside: how many elements have no gradient */
    double factor_a, factor_b, sign_a, sign_b;
    double limit, add;
    float low, high, bottom, top, least, most, scale; /* bottom, top: of the grid; least, most: the fused clamp, in real numbers */
} Join;

INLINE double term(float x, double factor, int kind) {
    return kind == DOWN ? floor((double)x * factor) : (double)rintf(x * (float)factor);
}

INLINE double joined(const Join *p, float a, float b, double c, int kind) {
    if (kind == PRODUCT) return (double)a * (double)b + c;
    return p->sign_a * term(a, p->factor_a, kind) + p->sign_b * term(b, p->factor_b, kind) + c;
}

INLINE float rounded(const Join *p, double acc, int64_t j, int mode) {
    float v;
    if (mode == REAL) {
        v = rintf((float)acc * p->multiplier[j]);
    } else {
        double bottom = -p->limit, top = p->limit - 1, d = floor((acc + p->half[j]) * p->first[j]);
        d = d < bottom ? bottom : d;
        d = d > top ? top : d;
        v = (float)floor(d * p->product[j] + p->add);
    }
    v = v < p->low ? p->low : v;
    return (v > p->high ? p->high : v) + 0.0f;
}

/* Whether the real number of an accumulator is within the clamp and the grid, with the roundings of PyTorch's tensors. */
static int within(const Join *p, double acc, int64_t j) {
    if (p->wide) {
        double value = acc * p->ratio[j], least = p->least, most = p->most, steps = value < least ? least : value > most ? most : value;
        steps /= (double)p->scale;
        return steps >= p->bottom && steps <= p->top && value >= least && value <= most;
    }
    float value = (float)acc * (float)p->ratio[j], steps = value < p->least ? p->least : value > p->most ? p->most : value;
    steps /= p->scale;
    return steps >= p->bottom && steps <= p->top && value >= p->least && value <= p->most;
}

/* The least and the largest accumulator within: there is an interval of them, since all that `within` computes rises with it. */
static void reach(const Join *p, int64_t j, double *least, double *most) {
    double largest = 4503599627370496.0, guess[2] = {p->bottom, p->top};
    for (int side = 0; side < 2; side++) {
        double sign = side ? 1.0 : -1.0, end = side ? p->most : p->least, step = p->ratio[j], inner = 0.0;
        double real = guess[side] * (double)p->scale;
        if (side ? end < real : end > real) real = end;
        double near = step > 0 ? real / step : largest;
        if (!(fabs(near) < largest)) near = near < 0 ? -largest : largest;
        near = floor(near);
        /* from the estimate outwards while inside, or inwards while outside; the estimate is off by its roundings alone */
        double width = floor(fabs(near) * (p->wide ? 1e-13 : 1e-6)) + 2;
        inner = near - sign * width;
        double outer = near + sign * width;
        while (outer - inner > 1 || inner - outer > 1) {
            double middle = floor((inner + outer) / 2);
            if (middle == inner || middle == outer) break;
            if (within(p, middle, j)) inner = middle;
            else outer = middle;
        }
        double found = within(p, outer, j) ? outer : inner;
        *(side ? most : least) = found;
    }
}

/* Every case has a loop of its own; B: whether b varies along the columns; C: whether there are constants; J: of every column. */
#define CASES(F, ...)                                                                                            \
    do {                                                                                                         \
        int real_ = p->mode == REAL, b_ = p->b_step != 0, c_ = p->c != NULL;                                     \
        if (p->kind == PRODUCT && p->each && real_) F(__VA_ARGS__, PRODUCT, REAL, 1, 1, 1);                       \
        else if (p->kind == PRODUCT && p->each) F(__VA_ARGS__, PRODUCT, FIXED, 1, 1, 1);                          \
        else if (p->kind == PRODUCT && real_ && b_) F(__VA_ARGS__, PRODUCT, REAL, 1, 0, 0);                       \
        else if (p->kind == PRODUCT && real_) F(__VA_ARGS__, PRODUCT, REAL, 0, 0, 0);                             \
        else if (p->kind == PRODUCT && b_) F(__VA_ARGS__, PRODUCT, FIXED, 1, 0, 0);                               \
        else if (p->kind == PRODUCT) F(__VA_ARGS__, PRODUCT, FIXED, 0, 0, 0);                                     \
        else if (real_ && b_ && c_) F(__VA_ARGS__, NEAREST, REAL, 1, 1, 0);                                       \
        else if (real_ && b_) F(__VA_ARGS__, NEAREST, REAL, 1, 0, 0);                                             \
        else if (real_ && c_) F(__VA_ARGS__, NEAREST, REAL, 0, 1, 0);                                             \
        else if (real_) F(__VA_ARGS__, NEAREST, REAL, 0, 0, 0);                                                   \
        else if (b_ && c_) F(__VA_ARGS__, DOWN, FIXED, 1, 1, 0);                                                  \
        else if (b_) F(__VA_ARGS__, DOWN, FIXED, 1, 0, 0);                                                        \
        else if (c_) F(__VA_ARGS__, DOWN, FIXED, 0, 1, 0);                                                        \
        else F(__VA_ARGS__, DOWN, FIXED, 0, 0, 0);                                                                \
    } while (0)

INLINE const float *row_of_b(const Join *p, int64_t row) { return p->b + (row % p->b_rows) * p->b_stride; }
INLINE const double *row_of_c(const Join *p, int64_t row, int C) { return C ? p->c + (row % p->c_rows) * p->c_stride : NULL; }

/* ---- the ends of the accumulators ---- */

INLINE void ends_elements(const Join *p, int64_t row, double *low, double *high, int kind, int mode, int B, int C, int J) {
    const float *restrict a = p->a + row * p->columns, *restrict b = row_of_b(p, row);
    const double *restrict c = row_of_c(p, row, C);
    int64_t n = p->columns, c_step = J ? 1 : p->c_step;
    if (J) {
        for (int64_t i = 0; i < n; i++) {
            double v = joined(p, a[i], b[i], c[i], kind);
            low[i] = v < low[i] ? v : low[i];
            high[i] = v > high[i] ? v : high[i];
        }
        return;
    }
    double least = *low, most = *high;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        double v = joined(p, a[i], b[B ? i : 0], C ? c[i * c_step] : 0.0, kind);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    *low = least;
    *high = most;
}

static void ends_row(const Join *p, int64_t row, double *low, double *high) { CASES(ends_elements, p, row, low, high); }

/* `ends`: (2, columns) where constants are of every column, else (2, 1). */
void fxq_join_ends(const Join *p) {
    int64_t width = p->each ? p->columns : 1;
    double *found = malloc((size_t)(2 * BLOCKS * width) * sizeof(double));
    if (!found) abort();
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        double *low = found + 2 * block * width, *high = low + width;
        for (int64_t i = 0; i < width; i++) low[i] = INFINITY, high[i] = -INFINITY;
        for (int64_t row = p->rows * block / BLOCKS; row < p->rows * (block + 1) / BLOCKS; row++) ends_row(p, row, low, high);
    }
    for (int64_t i = 0; i < width; i++) {
        double least = INFINITY, most = -INFINITY;
        for (int64_t block = 0; block < BLOCKS; block++) {
            double low = found[2 * block * width + i], high = found[(2 * block + 1) * width + i];
            least = low < least ? low : least;
            most = high > most ? high : most;
        }
        p->ends[i] = least;
        p->ends[width + i] = most;
    }
    free(found);
}

/* ---- forward ---- */

INLINE void forward_elements(
    const Join *p, int64_t row, const double *restrict least, const double *restrict most, int64_t *outside, int kind, int mode, int B,
    int C, int J) {
    int64_t at = row * p->columns, n = p->columns, c_step = J ? 1 : p->c_step, out = 0;
    const float *restrict a = p->a + at, *restrict b = row_of_b(p, row);
    const double *restrict c = row_of_c(p, row, C);
    float *restrict integers = p->integers + at, *restrict real = p->real + at, scale = p->scale;
    if (!p->inside) {
        for (int64_t i = 0; i < n; i++) {
            float v = rounded(p, joined(p, a[i], b[B ? i : 0], C ? c[i * c_step] : 0.0, kind), J ? i : 0, mode);
            integers[i] = v;
            real[i] = v * scale + 0.0f;
        }
        return;
    }
    uint8_t *restrict inside = p->inside + at;
#pragma omp simd reduction(+ : out)
    for (int64_t i = 0; i < n; i++) {
        int64_t j = J ? i : 0;
        double acc = joined(p, a[i], b[B ? i : 0], C ? c[i * c_step] : 0.0, kind);
        float v = rounded(p, acc, j, mode);
        integers[i] = v;
        real[i] = v * scale + 0.0f;
        uint8_t in = (acc >= least[j]) & (acc <= most[j]);
        inside[i] = in;
        out += !in;
    }
    *outside += out;
}

static void forward_row(const Join *p, int64_t row, const double *least, const double *most, int64_t *outside) {
    CASES(forward_elements, p, row, least, most, outside);
}

void fxq_join_forward(Join *p) {
    int64_t width = p->each ? p->columns : 1, outside = 0;
    double *limits = malloc((size_t)(2 * width) * sizeof(double));
    if (!limits) abort();
    if (p->inside)
        for (int64_t i = 0; i < width; i++) reach(p, i, limits + i, limits + width + i);
#pragma omp parallel for num_threads(p->threads) reduction(+ : outside) if (p->threads > 1)
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t found = 0;
        forward_row(p, row, limits, limits + width, &found);
        outside += found;
    }
    p->outside = outside;
    free(limits);
}

/* ---- and back ---- */

/* One row of gradients of the accumulators, in parts of COLUMNS; then what the operands have of them. */
static void back_row(const Join *p, int64_t row, double *t0, double *t1) {
    int64_t at = row * p->columns;
    const float *restrict b = row_of_b(p, row);
    float one = (float)p->ratio[0], part[COLUMNS], scale = p->scale;
    double of_row = 0;
    for (int64_t begin = 0; begin < p->columns; begin += COLUMNS) {
        int64_t n = p->columns - begin < COLUMNS ? p->columns - begin : COLUMNS, first = at + begin;
        const float *restrict g = p->of_integers ? p->of_integers + first : NULL, *restrict gy = p->of_real ? p->of_real + first : NULL;
        const uint8_t *restrict mask = p->mask ? p->mask + first : NULL;
        const float *restrict a = p->a ? p->a + first : NULL;
        float *restrict of_a = p->of_a ? p->of_a + first : NULL, *restrict of_b = p->of_b && p->b_step ? p->of_b + first : NULL;
        if (g && gy)
            for (int64_t i = 0; i < n; i++) part[i] = (g[i] + gy[i] * scale) / scale;
        else if (g)
            for (int64_t i = 0; i < n; i++) part[i] = g[i] / scale;
        else
            for (int64_t i = 0; i < n; i++) part[i] = gy[i] * scale / scale;
        if (mask)
            for (int64_t i = 0; i < n; i++) part[i] = mask[i] ? part[i] : 0.0f;
        if (p->each)
            for (int64_t i = 0; i < n; i++) part[i] *= (float)p->ratio[begin + i];
        else
            for (int64_t i = 0; i < n; i++) part[i] *= one;
        if (p->totals)
            for (int64_t i = 0; i < n; i++) {
                t0[begin + i] += part[i];
                t1[begin + i] += part[i] * a[i];
            }
        float sum = 0;
        if (p->kind == PRODUCT) {
            if (p->of_b && !p->b_step) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < n; i++) sum += part[i] * a[i];
                of_row += sum;
            } else if (of_b) {
                for (int64_t i = 0; i < n; i++) of_b[i] = part[i] * a[i];
            }
            if (of_a && p->b_step)
                for (int64_t i = 0; i < n; i++) of_a[i] = part[i] * b[begin + i];
            else if (of_a)
                for (int64_t i = 0; i < n; i++) of_a[i] = part[i] * b[0];
        } else {
            float fa = (float)(p->sign_a * p->factor_a), fb = (float)(p->sign_b * p->factor_b);
            if (p->of_b && !p->b_step) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < n; i++) sum += part[i];
                of_row += sum * fb;
            } else if (of_b) {
                for (int64_t i = 0; i < n; i++) of_b[i] = part[i] * fb;
            }
            if (of_a)
                for (int64_t i = 0; i < n; i++) of_a[i] = part[i] * fa;
        }
    }
    if (p->of_b && !p->b_step) p->of_b[row] = (float)of_row;
}

/* of_b: like `a` where b varies along the columns, else one for each row. */
void fxq_join_backward(const Join *p) {
    double *parts = p->totals ? calloc((size_t)(2 * BLOCKS * p->columns), sizeof(double)) : NULL;
    if (p->totals && !parts) abort();
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        double *t = parts ? parts + 2 * block * p->columns : NULL;
        for (int64_t row = p->rows * block / BLOCKS; row < p->rows * (block + 1) / BLOCKS; row++) back_row(p, row, t, t ? t + p->columns : NULL);
    }
    if (!parts) return;
    memset(p->totals, 0, (size_t)(2 * p->columns) * sizeof(double));
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t i = 0; i < 2 * p->columns; i++) p->totals[i] += parts[2 * block * p->columns + i];
    free(parts);
}

/* ---- tables: `a` holds integers from `low` to `high`; `multiplier` is the table ---- */

/* inside[i]: whether low + i occurs. */
void fxq_occurs(const Join *p) {
    int64_t low = (int64_t)p->low;
    for (int64_t i = 0; i < p->rows; i++) p->inside[(int64_t)p->a[i] - low] = 1;
}

/* And, where `inside` is given, the places in the table: bytes, or 16 bits if `wide`. */
void fxq_look_up(const Join *p) {
    int32_t low = (int32_t)p->low;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        const float *restrict a = p->a, *restrict table = p->multiplier;
        float *restrict integers = p->integers, *restrict real = p->real, scale = p->scale;
        uint8_t *restrict bytes = p->inside;
        uint16_t *restrict pairs = (uint16_t *)(void *)p->inside;
        int64_t begin = p->rows * block / BLOCKS, end = p->rows * (block + 1) / BLOCKS;
        for (int64_t i = begin; i < end; i++) {
            float v = table[(int32_t)a[i] - low];
            integers[i] = v;
            real[i] = v * scale + 0.0f;
        }
        if (bytes && p->wide)
            for (int64_t i = begin; i < end; i++) pairs[i] = (uint16_t)((int32_t)a[i] - low);
        else if (bytes)
            for (int64_t i = begin; i < end; i++) bytes[i] = (uint8_t)((int32_t)a[i] - low);
    }
}

#define BACK(FROM)                                                                                   \
    do {                                                                                             \
        if (g && gy)                                                                                 \
            for (int64_t i = begin; i < end; i++) of_a[i] = (g[i] + gy[i] * scale) * table[FROM[i]]; \
        else if (g)                                                                                  \
            for (int64_t i = begin; i < end; i++) of_a[i] = g[i] * table[FROM[i]];                   \
        else                                                                                         \
            for (int64_t i = begin; i < end; i++) of_a[i] = gy[i] * scale * table[FROM[i]];          \
    } while (0)

/* of_a = the gradient of what was looked up, times the table's entry at these places: how much it rises there, or 0. */
void fxq_look_back(const Join *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        const float *restrict table = p->multiplier, *restrict g = p->of_integers, *restrict gy = p->of_real;
        const uint8_t *restrict bytes = p->mask;
        const uint16_t *restrict pairs = (const uint16_t *)(const void *)p->mask;
        float *restrict of_a = p->of_a, scale = p->scale;
        int64_t begin = p->rows * block / BLOCKS, end = p->rows * (block + 1) / BLOCKS;
        if (p->wide) BACK(pairs);
        else BACK(bytes);
    }
}

/* ---- integers in bytes ---- */

/* inside: `rows` integers as int8; outside: how many of the BLOCKS parts hold one that is no int8. */
void fxq_to_bytes(Join *p) {
    int64_t outside = 0;
#pragma omp parallel for num_threads(p->threads) reduction(+ : outside) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        const float *restrict a = p->a;
        int8_t *restrict bytes = (int8_t *)(void *)p->inside;
        int64_t begin = p->rows * block / BLOCKS, end = p->rows * (block + 1) / BLOCKS;
        int32_t apart = 0;
        for (int64_t i = begin; i < end; i++) {
            int32_t v = (int32_t)a[i];
            bytes[i] = (int8_t)v;
            apart |= v ^ (int8_t)v;
        }
        outside += apart != 0;
    }
    p->outside = outside;
}

/* ---- functions of 16 bits by segments: fxquant/numerics/grids.py says what they are ---- */
enum { TABLES = 6, LAST = 63, STEP = 256 };

/* a: int64 integers; b: the starts; c: multiplier, bias and shift of each line; half: the entries; kind: the parity; real: the result. */
void fxq_segments(const Join *p) {
    const int64_t *integers = (const int64_t *)(const void *)p->a, *starts = (const int64_t *)(const void *)p->b;
    const int64_t *lines = (const int64_t *)(const void *)p->c, *entries = (const int64_t *)(const void *)p->half;
    int64_t *result = (int64_t *)(void *)p->real, low = (int64_t)p->low, high = (int64_t)p->high;
    for (int64_t i = 0; i < p->rows; i++) {
        int64_t q = integers[i], place = q, segment = 0;
        if (p->kind) {
            place = q < 0 ? -q : q;
            place = place > 32767 ? 32767 : place;
        }
        for (int64_t k = 0; k <= TABLES; k++) segment += starts[k] < place;
        const int64_t *line = lines + 3 * segment;
        int64_t v = place * line[0] + line[1];
        v = (v + (((int64_t)1 << line[2]) >> 1)) >> line[2];
        if (segment > 0 && segment <= TABLES) {
            int64_t position = v < 0 ? 0 : v > STEP * LAST ? STEP * LAST : v, entry = position / STEP;
            entry = entry > LAST - 1 ? LAST - 1 : entry;
            const int64_t *two = entries + (segment - 1) * (LAST + 1) + entry;
            int64_t beyond = position - STEP * entry;
            v = (two[0] * (STEP - beyond) + two[1] * beyond + STEP / 2) >> 8;
        }
        v = v < low ? low : v > high ? high : v;
        if (p->kind && q < 0) v *= p->kind;
        result[i] = v < low ? low : v > high ? high : v;
    }
}

/* ---- constants of ratios, c: fxquant/numerics/grids.py says what they are ---- */

/* The integer of `columns` bits times 2^-k that is nearest to a ratio; k is c_rows at most. One that rounds up to 2^columns is halved if
   `wide`, else one less. Returns whether the ratio is so near a tie, or so extreme, that float64 cannot decide. */
static int mantissa_of(const Join *p, double ratio, int64_t *mantissa, int64_t *k) {
    int exponent;
    frexp(ratio, &exponent);
    *k = p->columns - exponent > p->c_rows ? p->c_rows : p->columns - exponent;
    double scaled = scalbn(ratio, (int)*k);
    if (!(ratio < 1e280 && ratio > 1e-280) || fabs(scaled - floor(scaled) - 0.5) <= scaled * 0x1p-48) return 1;
    *mantissa = (int64_t)rint(scaled);
    int64_t carried = *mantissa >> p->columns;
    if (!p->wide) *mantissa -= carried;
    else *mantissa >>= carried, *k -= carried;
    return 0;
}

void fxq_mantissas(Join *p) {
    int64_t *integers = (int64_t *)(void *)p->integers, *exponents = (int64_t *)(void *)p->real;
    for (int64_t i = 0; i < p->rows && !p->outside; i++) p->outside = mantissa_of(p, p->c[i], integers + i, exponents + i);
}

/* Shift, multiplier and right shift: of_a, integers, real. A right shift below 1 becomes 1, with the largest multiplier. */
static void limited_constants(const Join *p, int64_t i, int64_t shift, int64_t mantissa, int64_t right) {
    ((int32_t *)(void *)p->of_a)[i] = (int32_t)shift;
    ((int32_t *)(void *)p->integers)[i] = right < 1 ? (int32_t)(((int64_t)1 << p->columns) - 1) : (int32_t)mantissa;
    ((int32_t *)(void *)p->real)[i] = right < 1 ? 1 : (int32_t)right;
}

/* b_rows: the largest right shift; b_stride: that of a layer, or one less, or 0; b_step: the least first shift of a wide operand, or 0; c_stride: the output's
   largest integer; c_step: the bits of the intermediate; mode: the largest first shift; each: whether there is one. */
void fxq_measured_constants(Join *p) {
    for (int64_t i = 0; i < p->rows && !p->outside; i++) {
        int64_t mantissa, k;
        if ((p->outside = mantissa_of(p, p->c[i], &mantissa, &k))) return;
        int64_t right = k;
        if (p->each) {
            double product = scalbn(p->c[i], (int)(k - p->b_stride)) * (double)(((int64_t)1 << (p->c_step - 1)) - 1);
            int64_t last = !p->b_stride ? p->b_rows : product > (double)p->c_stride ? p->b_stride : p->b_stride - 1;
            right = k < last ? k : last;
            if (k - right > p->mode) right = k - p->mode;
            int64_t most = k - p->b_step > 1 ? k - p->b_step : 1;
            if (p->b_step && right > most) right = most;
        }
        limited_constants(p, i, k - right, mantissa, right);
    }
}

/* b_rows, c_stride, c_step as above; each: the bits of an accumulator with a first shift, else 0. */
void fxq_fixed_constants(Join *p) {
    int64_t most = ((int64_t)1 << (p->c_step - 1)) - 1, limit = 2 * p->c_stride + 1, smaller = -1;
    for (int64_t least = (most << (p->columns - 1)) * 2 / limit; least; least >>= 1) smaller++;
    for (int64_t i = 0; i < p->rows && !p->outside; i++) {
        int64_t mantissa, k, shift = 0;
        if ((p->outside = mantissa_of(p, p->c[i], &mantissa, &k))) return;
        if (p->each) {
            shift = k - smaller - (2 * most * mantissa >= limit << (smaller + 1));
            shift = shift < 0 ? 0 : shift > p->each - 1 ? p->each - 1 : shift;
        }
        int64_t right = k - shift;
        if (right > p->b_rows) mantissa = 0, right = p->b_rows;
        limited_constants(p, i, shift, mantissa, right);
    }
}

/* ---- marks: where `mask`, of `rows` bytes, is 0, and the other way round ---- */

void fxq_places(const Join *p) {
    int32_t *places = (int32_t *)(void *)p->integers;
    int64_t i = 0, n = p->rows, found = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t eight;
        memcpy(&eight, p->mask + i, 8);
        if (eight == 0x0101010101010101u) continue;
        for (int64_t j = i; j < i + 8; j++)
            if (!p->mask[j]) places[found++] = (int32_t)j;
    }
    for (; i < n; i++)
        if (!p->mask[i]) places[found++] = (int32_t)i;
}

void fxq_marks(const Join *p) {
    const int32_t *places = (const int32_t *)(const void *)p->a;
    memset(p->inside, 1, (size_t)p->rows);
    for (int64_t i = 0; i < p->columns; i++) p->inside[places[i]] = 0;
}
