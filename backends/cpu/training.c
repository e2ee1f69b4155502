/* What training computes of large float tensors whose elements are integers, in one pass over memory each.

   A tensor is (outer, channels, inner): an image that lies contiguously, or, with inner = 1, rows or an image channels last. Sums of
   integers are exact. Sums of gradients are formed in BLOCKS parts and joined in order, so that the number of threads changes
   nothing. The words are those of fxquant/training/fused_layers.py, which says what each function gives. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { REAL = 1, FIXED = 2, BLOCKS = 16, CHUNK = 8192 };

typedef struct {
    const float *sums, *bias, *residual, *factor; /* factor: what the residual is multiplied by, per channel */
    const float *multiplier;                      /* REAL */
    const double *half, *first, *product;         /* FIXED: floor(clip(floor((acc + half) * first)) * product + add) */
    const float *ratio;                           /* the real number of one step of the accumulator */
    const float *of_integers, *of_real;           /* gradients of what `finish` writes; either may be absent */
    float *integers, *real, *of_sums, *of_residual;
    uint8_t *inside;                              /* whether an element has a gradient; may be absent */
    double *totals;                               /* (4, channels) */
    float *ends;                                  /* (2, channels): the least and the largest accumulator */
    const float *offset, *slope;                  /* `centre`: what is added to the gradient: offset + slope * (sums + bias) */
    int64_t outer, channels, inner, mode, threads, outside;
    double limit, add;
    float low, high, least, most, scale;          /* least, most: the fused clamp, in real numbers */
    float bottom, top;                            /* of the grid, where gradients end */
} Pass;

/* The accumulator of an element: exact, since it is proved to stay below 2^24. */
INLINE float accumulated(const float *sums, const float *bias, const float *residual, const float *factor, int64_t i, int64_t j, int adds) {
    float value = sums[i] + bias[j];
    return adds ? value + floorf(residual[i] * factor[j]) : value; /* rounded down: the factor may hold a shift */
}

INLINE float limited(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

/* ---- mean, variance and ends of sums ---- */

/* Of n elements from `at` on, all of one channel. */
INLINE void collect_row(const float *restrict x, int64_t n, int64_t *sum, __int128 *squares, float *low, float *high) {
    for (int64_t begin = 0; begin < n; begin += CHUNK) {
        int64_t end = begin + CHUNK < n ? begin + CHUNK : n, s = 0, ss = 0;
        float least = *low, most = *high;
#pragma omp simd reduction(+ : s, ss) reduction(min : least) reduction(max : most)
        for (int64_t i = begin; i < end; i++) {
            int32_t v = (int32_t)x[i];
            s += v;
            ss += (int64_t)v * (int64_t)v;
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        *sum += s;
        *squares += ss;
        *low = least;
        *high = most;
    }
}

static void statistics_of(const Pass *p, int64_t c, int64_t sum, __int128 squares) {
    int64_t n = p->outer * p->inner;
    __int128 apart = squares * n - (__int128)sum * sum;
    p->totals[c] = (double)sum / (double)n;
    p->totals[p->channels + c] = (double)apart / (double)n / (double)n;
}

void fxq_collect(const Pass *p) {
    int64_t channels = p->channels;
    if (p->inner > 1) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
        for (int64_t c = 0; c < channels; c++) {
            int64_t sum = 0;
            __int128 squares = 0;
            float low = INFINITY, high = -INFINITY;
            for (int64_t o = 0; o < p->outer; o++) collect_row(p->sums + (o * channels + c) * p->inner, p->inner, &sum, &squares, &low, &high);
            statistics_of(p, c, sum, squares);
            p->ends[c] = low;
            p->ends[channels + c] = high;
        }
        return;
    }
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < (channels + 63) / 64; block++) {
        int64_t first = block * 64, n = channels - first < 64 ? channels - first : 64;
        int64_t sum[64] = {0}, part[64];
        __int128 squares[64] = {0};
        float low[64], high[64];
        for (int64_t i = 0; i < n; i++) low[i] = INFINITY, high[i] = -INFINITY;
        for (int64_t begin = 0; begin < p->outer; begin += CHUNK) {
            int64_t end = begin + CHUNK < p->outer ? begin + CHUNK : p->outer;
            memset(part, 0, sizeof part);
            for (int64_t o = begin; o < end; o++) {
                const float *restrict x = p->sums + o * channels + first;
                for (int64_t i = 0; i < n; i++) {
                    int32_t v = (int32_t)x[i];
                    sum[i] += v;
                    part[i] += (int64_t)v * (int64_t)v;
                    low[i] = x[i] < low[i] ? x[i] : low[i];
                    high[i] = x[i] > high[i] ? x[i] : high[i];
                }
            }
            for (int64_t i = 0; i < n; i++) squares[i] += part[i];
        }
        for (int64_t i = 0; i < n; i++) {
            statistics_of(p, first + i, sum[i], squares[i]);
            p->ends[first + i] = low[i];
            p->ends[channels + first + i] = high[i];
        }
    }
}

/* ---- the ends of accumulators with a residual ---- */

INLINE void ends_elements(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, int adds, float *low, float *high) {
    const float *restrict x = p->sums + at, *restrict r = adds ? p->residual + at : NULL;
    const float *restrict bias = p->bias + c, *restrict factor = adds ? p->factor + c : NULL;
    if (vary) {
        for (int64_t i = 0; i < n; i++) {
            float v = accumulated(x, bias, r, factor, i, i, adds);
            low[i] = v < low[i] ? v : low[i];
            high[i] = v > high[i] ? v : high[i];
        }
        return;
    }
    float least = *low, most = *high;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        float v = accumulated(x, bias, r, factor, i, 0, adds);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    *low = least;
    *high = most;
}

static void ends_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, float *low, float *high) {
    int adds = p->residual != NULL;
    if (vary && adds) ends_elements(p, c, at, n, 1, 1, low, high);
    else if (vary) ends_elements(p, c, at, n, 1, 0, low, high);
    else if (adds) ends_elements(p, c, at, n, 0, 1, low, high);
    else ends_elements(p, c, at, n, 0, 0, low, high);
}

void fxq_ends(const Pass *p) {
    int64_t channels = p->channels, inner = p->inner, width = inner > 1 ? 1 : 64;
    float *low = p->ends, *high = p->ends + channels;
    for (int64_t c = 0; c < channels; c++) low[c] = INFINITY, high[c] = -INFINITY;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t c = 0; c < channels; c += width)
        for (int64_t o = 0; o < p->outer; o++) {
            int64_t n = inner > 1 ? inner : channels - c < width ? channels - c : width;
            ends_row(p, c, (o * channels + c) * inner, n, inner == 1, low + c, high + c);
        }
}

/* ---- from accumulators to integers and real numbers ---- */

INLINE void finish_elements(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, int mode, int adds) {
    const float *restrict x = p->sums + at, *restrict r = adds ? p->residual + at : NULL;
    const float *restrict bias = p->bias + c, *restrict factor = adds ? p->factor + c : NULL;
    const float *restrict multiplier = mode == REAL ? p->multiplier + c : NULL;
    const double *restrict half = mode == FIXED ? p->half + c : NULL, *restrict first = mode == FIXED ? p->first + c : NULL;
    const double *restrict product = mode == FIXED ? p->product + c : NULL;
    float *restrict integers = p->integers + at, *restrict real = p->real + at;
    float low = p->low, high = p->high, scale = p->scale;
    double bottom = -p->limit, top = p->limit - 1, add = p->add;
    for (int64_t i = 0; i < n; i++) {
        int64_t j = vary ? i : 0;
        float v = accumulated(x, bias, r, factor, i, j, adds);
        if (mode == REAL) {
            v = rintf(v * multiplier[j]);
        } else {
            double d = floor(((double)v + half[j]) * first[j]);
            d = d < bottom ? bottom : d;
            d = d > top ? top : d;
            v = (float)floor(d * product[j] + add);
        }
        v = limited(v, low, high) + 0.0f;
        integers[i] = v;
        real[i] = v * scale + 0.0f;
    }
}

/* Every case has a loop of its own, chosen here and not around the threads, whose functions know no constants. */
static void finish_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary) {
    int real = p->mode == REAL, adds = p->residual != NULL;
    if (vary) {
        if (real && adds) finish_elements(p, c, at, n, 1, REAL, 1);
        else if (real) finish_elements(p, c, at, n, 1, REAL, 0);
        else if (adds) finish_elements(p, c, at, n, 1, FIXED, 1);
        else finish_elements(p, c, at, n, 1, FIXED, 0);
    } else {
        if (real && adds) finish_elements(p, c, at, n, 0, REAL, 1);
        else if (real) finish_elements(p, c, at, n, 0, REAL, 0);
        else if (adds) finish_elements(p, c, at, n, 0, FIXED, 1);
        else finish_elements(p, c, at, n, 0, FIXED, 0);
    }
}

/* Which elements have a gradient, and how many have none. */
INLINE int64_t mark_elements(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, int adds) {
    const float *restrict x = p->sums + at, *restrict r = adds ? p->residual + at : NULL;
    const float *restrict bias = p->bias + c, *restrict factor = adds ? p->factor + c : NULL, *restrict ratio = p->ratio + c;
    uint8_t *restrict marks = p->inside + at;
    float bottom = p->bottom, top = p->top, least = p->least, most = p->most, scale = p->scale;
    int32_t outside = 0;
#pragma omp simd reduction(+ : outside)
    for (int64_t i = 0; i < n; i++) {
        int64_t j = vary ? i : 0;
        float value = accumulated(x, bias, r, factor, i, j, adds) * ratio[j], steps = limited(value, least, most) / scale;
        int inside = (steps >= bottom) & (steps <= top) & (value >= least) & (value <= most);
        marks[i] = (uint8_t)inside;
        outside += !inside;
    }
    return outside;
}

static int64_t mark_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary) {
    if (!p->inside) return 0;
    if (vary) return p->residual ? mark_elements(p, c, at, n, 1, 1) : mark_elements(p, c, at, n, 1, 0);
    return p->residual ? mark_elements(p, c, at, n, 0, 1) : mark_elements(p, c, at, n, 0, 0);
}

void fxq_finish_forward(Pass *p) {
    int64_t channels = p->channels, inner = p->inner, outside = 0;
    if (inner > 1) {
#pragma omp parallel for num_threads(p->threads) reduction(+ : outside) if (p->threads > 1)
        for (int64_t row = 0; row < p->outer * channels; row++) {
            finish_row(p, row % channels, row * inner, inner, 0);
            outside += mark_row(p, row % channels, row * inner, inner, 0);
        }
    } else {
#pragma omp parallel for num_threads(p->threads) reduction(+ : outside) if (p->threads > 1)
        for (int64_t row = 0; row < p->outer; row++) {
            finish_row(p, 0, row * channels, channels, 1);
            outside += mark_row(p, 0, row * channels, channels, 1);
        }
    }
    p->outside = outside;
}

/* ---- and back ---- */

/* `totals`: the sums of the gradient of the accumulator, of that of the real number times the accumulator, and of the former times
   the residual. */
INLINE void back_elements(
    const Pass *p, int64_t c, int64_t at, int64_t n, int vary, int adds, int both, double *t0, double *t1, double *t2) {
    const float *restrict x = p->sums + at, *restrict r = adds ? p->residual + at : NULL;
    const float *restrict bias = p->bias + c, *restrict factor = adds ? p->factor + c : NULL, *restrict ratio = p->ratio + c;
    const float *restrict g = p->of_integers + at, *restrict gy = both ? p->of_real + at : NULL;
    float *restrict d = p->of_sums + at, *restrict dr = adds ? p->of_residual + at : NULL;
    float low = p->bottom, high = p->top, least = p->least, most = p->most, scale = p->scale;
    double s0 = 0, s1 = 0, s2 = 0;
    for (int64_t begin = 0; begin < n; begin += 256) {
        int64_t end = begin + 256 < n ? begin + 256 : n;
        float f0 = 0, f1 = 0, f2 = 0;
#pragma omp simd reduction(+ : f0, f1, f2)
        for (int64_t i = begin; i < end; i++) {
            int64_t j = vary ? i : 0;
            float v = accumulated(x, bias, r, factor, i, j, adds), value = v * ratio[j];
            float steps = limited(value, least, most) / scale;
            int inside = (steps >= low) & (steps <= high) & (value >= least) & (value <= most);
            float whole = both ? g[i] + gy[i] * scale : g[i];
            float of_value = inside ? whole / scale : 0.0f;
            float of_sum = of_value * ratio[j];
            d[i] = of_sum;
            if (adds) dr[i] = of_sum * factor[j];
            if (vary) {
                t0[i] += of_sum;
                t1[i] += of_value * v;
                if (adds) t2[i] += of_sum * r[i];
            } else {
                f0 += of_sum;
                f1 += of_value * v;
                if (adds) f2 += of_sum * r[i];
            }
        }
        s0 += f0, s1 += f1, s2 += f2;
    }
    if (!vary) *t0 += s0, *t1 += s1, *t2 += s2;
}

static void back_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, double *t0, double *t1, double *t2) {
    int adds = p->residual != NULL, both = p->of_real != NULL;
    if (vary) {
        if (adds && both) back_elements(p, c, at, n, 1, 1, 1, t0, t1, t2);
        else if (adds) back_elements(p, c, at, n, 1, 1, 0, t0, t1, t2);
        else if (both) back_elements(p, c, at, n, 1, 0, 1, t0, t1, t2);
        else back_elements(p, c, at, n, 1, 0, 0, t0, t1, t2);
    } else {
        if (adds && both) back_elements(p, c, at, n, 0, 1, 1, t0, t1, t2);
        else if (adds) back_elements(p, c, at, n, 0, 1, 0, t0, t1, t2);
        else if (both) back_elements(p, c, at, n, 0, 0, 1, t0, t1, t2);
        else back_elements(p, c, at, n, 0, 0, 0, t0, t1, t2);
    }
}

void fxq_finish_backward(const Pass *p) {
    int64_t channels = p->channels, inner = p->inner;
    if (inner > 1) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
        for (int64_t c = 0; c < channels; c++) {
            double t0 = 0, t1 = 0, t2 = 0;
            for (int64_t o = 0; o < p->outer; o++) back_row(p, c, (o * channels + c) * inner, inner, 0, &t0, &t1, &t2);
            p->totals[c] = t0, p->totals[channels + c] = t1, p->totals[2 * channels + c] = t2;
        }
        return;
    }
    double *parts = calloc((size_t)(3 * BLOCKS * channels), sizeof(double));
    if (!parts) abort();
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        double *t = parts + 3 * block * channels;
        for (int64_t o = p->outer * block / BLOCKS; o < p->outer * (block + 1) / BLOCKS; o++)
            back_row(p, 0, o * channels, channels, 1, t, t + channels, t + 2 * channels);
    }
    memset(p->totals, 0, (size_t)(3 * channels) * sizeof(double));
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t i = 0; i < 3 * channels; i++) p->totals[i] += parts[3 * block * channels + i];
    free(parts);
}

/* Back by marks, without the sums; totals: those of the gradient of the accumulator. */
INLINE void marked_elements(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, int marks, int both, double *total) {
    const float *restrict ratio = p->ratio + c, *restrict factor = p->of_residual ? p->factor + c : NULL;
    const float *restrict g = p->of_integers + at, *restrict gy = both ? p->of_real + at : NULL;
    const uint8_t *restrict inside = marks ? p->inside + at : NULL;
    float *restrict d = p->of_sums + at, *restrict dr = p->of_residual ? p->of_residual + at : NULL, scale = p->scale;
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += 256) {
        int64_t end = begin + 256 < n ? begin + 256 : n;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = begin; i < end; i++) {
            float whole = both ? g[i] + gy[i] * scale : g[i];
            float of_sum = (marks && !inside[i] ? 0.0f : whole / scale) * ratio[vary ? i : 0];
            d[i] = of_sum;
            if (vary) total[i] += of_sum;
            else part += of_sum;
        }
        if (dr)
            for (int64_t i = begin; i < end; i++) dr[i] = d[i] * factor[vary ? i : 0];
        sum += part;
    }
    if (!vary) *total += sum;
}

static void marked_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary, double *total) {
    int marks = p->inside != NULL, both = p->of_real != NULL;
    if (vary) {
        if (marks && both) marked_elements(p, c, at, n, 1, 1, 1, total);
        else if (marks) marked_elements(p, c, at, n, 1, 1, 0, total);
        else if (both) marked_elements(p, c, at, n, 1, 0, 1, total);
        else marked_elements(p, c, at, n, 1, 0, 0, total);
    } else {
        if (marks && both) marked_elements(p, c, at, n, 0, 1, 1, total);
        else if (marks) marked_elements(p, c, at, n, 0, 1, 0, total);
        else if (both) marked_elements(p, c, at, n, 0, 0, 1, total);
        else marked_elements(p, c, at, n, 0, 0, 0, total);
    }
}

void fxq_marked_backward(const Pass *p) {
    int64_t channels = p->channels, inner = p->inner;
    if (inner > 1) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
        for (int64_t c = 0; c < channels; c++) {
            double total = 0;
            for (int64_t o = 0; o < p->outer; o++) marked_row(p, c, (o * channels + c) * inner, inner, 0, &total);
            p->totals[c] = total;
        }
        return;
    }
    double *parts = calloc((size_t)(BLOCKS * channels), sizeof(double));
    if (!parts) abort();
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t o = p->outer * block / BLOCKS; o < p->outer * (block + 1) / BLOCKS; o++)
            marked_row(p, 0, o * channels, channels, 1, parts + block * channels);
    memset(p->totals, 0, (size_t)channels * sizeof(double));
    for (int64_t block = 0; block < BLOCKS; block++)
        for (int64_t i = 0; i < channels; i++) p->totals[i] += parts[block * channels + i];
    free(parts);
}

/* of_sums += offset + slope * (sums + bias): what the statistics of a batch add to its gradient. */
INLINE void centre_row(const Pass *p, int64_t c, int64_t at, int64_t n, int vary) {
    const float *restrict x = p->sums + at, *restrict offset = p->offset + c, *restrict slope = p->slope + c, *restrict bias = p->bias + c;
    float *restrict d = p->of_sums + at;
    for (int64_t i = 0; i < n; i++) {
        int64_t j = vary ? i : 0;
        d[i] += offset[j] + slope[j] * (x[i] + bias[j]);
    }
}

void fxq_centre(const Pass *p) {
    int64_t channels = p->channels, inner = p->inner;
    if (inner > 1) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
        for (int64_t row = 0; row < p->outer * channels; row++) centre_row(p, row % channels, row * inner, inner, 0);
    } else {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
        for (int64_t row = 0; row < p->outer; row++) centre_row(p, 0, row * channels, channels, 1);
    }
}

/* ---- weights: outer is the channels, inner the weights of one; `sums` the weight, `ratio` the gain, `multiplier` the scale ---- */

void fxq_weight_ends(const Pass *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t c = 0; c < p->channels; c++) {
        const float *restrict w = p->sums + c * p->inner;
        float most = 0;
        int unordered = 0;
#pragma omp simd reduction(max : most) reduction(| : unordered)
        for (int64_t i = 0; i < p->inner; i++) {
            float v = fabsf(w[i]);
            unordered |= v != v;
            most = v > most ? v : most;
        }
        p->ends[c] = unordered ? NAN : most;
    }
}

/* The largest sum of magnitudes of two neighbours of one sign, a and b. */
#define PAIR(FIRST, SECOND)                                                \
    do {                                                                   \
        float a = (FIRST) * gain, b = (SECOND) * gain;                     \
        float up = (a > 0 ? a : 0.0f) + (b > 0 ? b : 0.0f);                \
        float down = (a < 0 ? -a : 0.0f) + (b < 0 ? -b : 0.0f);            \
        unordered |= (a != a) | (b != b);                                  \
        up = up > down ? up : down;                                        \
        most = up > most ? up : most;                                      \
    } while (0)

/* Neighbours of a row that has the input channels last; in memory, `outer` is the elements of one input channel, which follow each other. */
void fxq_weight_pairs(const Pass *p) {
    int64_t taps = p->outer, inputs = p->inner / taps;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t c = 0; c < p->channels; c++) {
        const float *restrict w = p->sums + c * p->inner;
        float gain = p->ratio[c], most = 0;
        int unordered = 0;
        if (taps == 1) {
#pragma omp simd reduction(max : most) reduction(| : unordered)
            for (int64_t i = 0; i < inputs / 2; i++) PAIR(w[2 * i], w[2 * i + 1]);
            if (inputs % 2) PAIR(w[inputs - 1], 0.0f);
        } else if (inputs % 2 == 0) {
            for (int64_t j = 0; j < inputs; j += 2) {
#pragma omp simd reduction(max : most) reduction(| : unordered)
                for (int64_t t = 0; t < taps; t++) PAIR(w[j * taps + t], w[(j + 1) * taps + t]);
            }
        } else {
            for (int64_t i = 0; i < p->inner; i += 2) {
                int64_t next = i + 1;
                float second = next < p->inner ? w[next % inputs * taps + next / inputs] : 0.0f;
                PAIR(w[i % inputs * taps + i / inputs], second);
            }
        }
        p->ends[c] = unordered ? NAN : most;
    }
}

void fxq_weight_forward(const Pass *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t c = 0; c < p->channels; c++) {
        const float *restrict w = p->sums + c * p->inner;
        float *restrict q = p->integers + c * p->inner;
        float gain = p->ratio[c], scale = p->multiplier[c], low = p->low, high = p->high;
        int64_t total = 0;
        int unordered = 0;
#pragma omp simd reduction(+ : total) reduction(| : unordered)
        for (int64_t i = 0; i < p->inner; i++) {
            float v = limited(rintf(w[i] * gain / scale), low, high);
            q[i] = v;
            unordered |= v != v;
            total += v != v ? 0 : (int32_t)fabsf(v);
        }
        p->totals[c] = unordered ? NAN : (double)total; /* which no bound of a sum is proved from */
    }
}

/* of_sums = of_integers / scale * gain; totals: the gradient of the gain. */
void fxq_weight_backward(const Pass *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t c = 0; c < p->channels; c++) {
        const float *restrict w = p->sums + c * p->inner, *restrict g = p->of_integers + c * p->inner;
        float *restrict d = p->of_sums + c * p->inner;
        float gain = p->ratio[c], scale = p->multiplier[c];
        double total = 0;
        for (int64_t begin = 0; begin < p->inner; begin += 256) {
            int64_t end = begin + 256 < p->inner ? begin + 256 : p->inner;
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = begin; i < end; i++) {
                float v = g[i] / scale;
                d[i] = v * gain;
                part += v * w[i];
            }
            total += part;
        }
        p->totals[c] = total;
    }
}

/* ---- observers ---- */

typedef struct {
    const float *value;
    const int64_t *places;           /* of the elements that count; NULL: all of them */
    float *low, *high;               /* of each row */
    float *counts, *negative;        /* per bin; negative may be NULL */
    int64_t rows, columns, step, count, bins, threads;
    float first, last;               /* where the first bin begins and the last one ends */
} Count;

/* The least and the largest element of each row, NaN where it holds one. */
void fxq_row_ends(const Count *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t row = 0; row < p->rows; row++) {
        const float *restrict x = p->value + row * p->columns;
        float low = INFINITY, high = -INFINITY;
        int unordered = 0;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(| : unordered)
        for (int64_t i = 0; i < p->columns; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            unordered |= x[i] != x[i];
        }
        p->low[row] = unordered ? NAN : low;
        p->high[row] = unordered ? NAN : high;
    }
}

/* The bins of values, with the roundings of torch.histc: (value - first) * bins / span, rounded down; `bins` for what lies outside. */
INLINE void bins_of(const float *restrict values, int32_t *restrict at, int64_t n, float first, float last, int32_t bins) {
    float span = last - first, count = (float)bins;
    for (int64_t i = 0; i < n; i++) {
        float value = values[i], inside = value >= first && value <= last ? value : last;
        float place = (inside - first) * count / span; /* infinite, or NaN, where a float32 does not hold the product */
        int32_t bin = place < count ? (int32_t)place : bins - 1;
        at[i] = value >= first && value <= last ? bin : bins;
    }
}

enum { BLOCK = 512, TABLES = 4 }; /* four tables, so that equal bins in a row do not wait for one another */

void fxq_magnitudes(const Count *p) {
    int64_t bins = p->bins, width = 2 * (bins + 1);
    float values[BLOCK], magnitudes[BLOCK];
    int32_t at[BLOCK];
    uint32_t *tables = calloc((size_t)(TABLES * width), sizeof(uint32_t));
    if (!tables) abort();
    for (int64_t begin = 0; begin < p->count; begin += BLOCK) {
        int64_t n = p->count - begin < BLOCK ? p->count - begin : BLOCK;
        if (p->places)
            for (int64_t i = 0; i < n; i++) values[i] = p->value[p->places[begin + i]];
        else memcpy(values, p->value + begin, (size_t)n * sizeof(float));
        for (int64_t i = 0; i < n; i++) magnitudes[i] = fabsf(values[i]);
        bins_of(magnitudes, at, n, p->first, p->last, (int32_t)bins);
        for (int64_t i = 0; i < n; i++) at[i] += values[i] < 0 ? (int32_t)bins + 1 : 0;
        for (int64_t i = 0; i < n; i++) tables[(i % TABLES) * width + at[i]]++;
    }
    for (int64_t b = 0; b < bins; b++) {
        uint32_t positive = 0, negative = 0;
        for (int64_t t = 0; t < TABLES; t++) positive += tables[t * width + b], negative += tables[t * width + bins + 1 + b];
        p->counts[b] = (float)(positive + negative);
        p->negative[b] = (float)negative;
    }
    free(tables);
}

/* Adds to counts, which has bins + 1 of them: of one row at `value`, every `step`-th element. */
void fxq_signed(const Count *p) {
    int64_t count = (p->columns + p->step - 1) / p->step;
    float values[BLOCK];
    int32_t at[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t n = count - begin < BLOCK ? count - begin : BLOCK;
        for (int64_t i = 0; i < n; i++) values[i] = p->value[(begin + i) * p->step];
        bins_of(values, at, n, p->first, p->last, (int32_t)p->bins);
        for (int64_t i = 0; i < n; i++) p->counts[at[i]] += 1.0f;
    }
}

/* ---- quantization of float values, without channels: `outer` elements ---- */

/* The integers of `sums` on the scale; and, where `inside` is given, the marks of what lies from `bottom` to `top` steps, and the number of
   all others. Divisions as PyTorch's, of NaN as of 0. */
void fxq_quantize(Pass *p) {
    int64_t outside = 0;
#pragma omp parallel for num_threads(p->threads) reduction(+ : outside) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        const float *restrict x = p->sums;
        float *restrict q = p->integers;
        uint8_t *restrict inside = p->inside;
        float scale = p->scale, limit = p->scale * 1048576.0f, low = p->low, high = p->high, bottom = p->bottom, top = p->top;
        int64_t begin = p->outer * block / BLOCKS, end = p->outer * (block + 1) / BLOCKS;
        for (int64_t i = begin; i < end; i++) {
            float v = x[i] != x[i] ? 0.0f : limited(x[i], -limit, limit);
            q[i] = limited(rintf(v / scale), low, high);
        }
        int64_t within = 0;
        for (int64_t i = begin; inside && i < end; i++) {
            float steps = x[i] / scale;
            inside[i] = (uint8_t)((steps >= bottom) & (steps <= top));
            within += inside[i];
        }
        outside += inside ? end - begin - within : 0;
    }
    p->outside = outside;
}

/* of_sums = of_integers / scale, or 0 where `inside` is given and 0. */
void fxq_quantize_backward(const Pass *p) {
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (int64_t block = 0; block < BLOCKS; block++) {
        const float *restrict g = p->of_integers;
        const uint8_t *restrict inside = p->inside;
        float *restrict of = p->of_sums, scale = p->scale;
        int64_t begin = p->outer * block / BLOCKS, end = p->outer * (block + 1) / BLOCKS;
        if (inside)
            for (int64_t i = begin; i < end; i++) of[i] = (inside[i] ? g[i] : 0.0f) / scale;
        else
            for (int64_t i = begin; i < end; i++) of[i] = g[i] / scale;
    }
}
