/// quantize: X Y
/* Section 4: clip(half_even(x' / scale), low, high) + zero, x' being x within 2^20 steps and 0 for NaN. */
static void quantize(ptrdiff_t count, const X *x, float scale, int32_t low, int32_t high, int32_t zero, Y *y)
{
    const float limit = scale * 1048576.0f;
    for (ptrdiff_t i = 0; i < count; i++) {
        float v = (float)x[i];
        if (v != v) v = 0.0f;
        if (v < -limit) v = -limit;
        if (v > limit) v = limit;
        float steps = v / scale;
        y[i] = (Y)(clip(half_even(steps), low, high) + zero);
    }
}

/// dequantize: X Y
/* Section 4: float(q - zero) · scale. */
static void dequantize(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const float *scale,
                       int32_t zero, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        float centred = (float)x[i] - (float)zero;
        float real = centred * scale[place(i, rank, size, step)];
        y[i] = (Y)real;
    }
}

/// requantize_fixed: X Y
/* Section 8: clip(round(sat(floor(acc / 2^a)) · M / 2^b), low, high). rounding: 0 is floor, 1 half up, 2 floor after half a step, 3 the same
   of the nearest integer, 4 half away from zero, 5 half to even. */
static void requantize_fixed(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const int32_t *shift,
                             const int32_t *multiplier, const int32_t *right_shift, int bits, int rounding, int32_t low, int32_t high,
                             Y *y)
{
    const int64_t limit = (int64_t)1 << (bits - 1);
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t p = place(i, rank, size, step);
        int64_t v = x[i];
        if (rounding == 2 || rounding == 3) v += half_step(shift[p], multiplier[p], right_shift[p], rounding == 3);
        v = clip(floor_shift(v, shift[p]), -limit, limit - 1) * multiplier[p];
        if (rounding == 1 || rounding == 4) v += ((int64_t)1 << (right_shift[p] - 1)) - (rounding == 4 && v < 0);
        if (rounding == 5) v += ((int64_t)1 << (right_shift[p] - 1)) - 1 + (floor_shift(v, right_shift[p]) & 1);
        y[i] = (Y)clip(floor_shift(v, right_shift[p]), low, high);
    }
}

/// requantize_real: X Y
/* Section 9: clip(half_even(float(float(acc) · M)), low, high), and section 20: + zero. Limits are whole, so clipping may come first. */
static void requantize_real(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const float *multiplier,
                            int32_t low, int32_t high, int32_t zero, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        float accumulator = (float)x[i];
        float product = accumulator * multiplier[place(i, rank, size, step)];
        double v = product < (double)low ? (double)low : product > (double)high ? (double)high : (double)product;
        y[i] = (Y)(half_even(v) + zero);
    }
}

/// accumulator_output: X Y
/* Section 16, 32-bit outputs: the accumulator itself. */
static void accumulator_output(ptrdiff_t count, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)x[i];
}

/// clamp_accumulator: X B Y
/* Section 10 with limits for each channel. */
static void clamp_accumulator(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const B *low,
                              const B *high, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t p = place(i, rank, size, step);
        y[i] = (Y)clip(x[i], low[p], high[p]);
    }
}

/// align_fixed: X Y
/* Section 11: floor(q · M / 2^k). */
static void align_fixed(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const int32_t *multiplier,
                        const int32_t *right_shift, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t p = place(i, rank, size, step);
        y[i] = (Y)floor_shift((int64_t)x[i] * multiplier[p], right_shift[p]);
    }
}

/// align_real: X Y
/* Section 11: half_even(float(float(q) · ratio)). */
static void align_real(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const float *ratio, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        float q = (float)x[i];
        float product = q * ratio[place(i, rank, size, step)];
        y[i] = (Y)half_even(product);
    }
}

/// add_residual: X R Y
/* Section 7: acc + r · k. */
static void add_residual(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const ptrdiff_t *k_step, const X *x,
                         const R *residual, const int32_t *k, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++)
        y[i] = (Y)(x[i] + (Y)residual[place(i, rank, size, step)] * k[place(i, rank, size, k_step)]);
}

/// add_residual_shifted: X R Y
/* Section 7: acc + floor(r · E / 2^n). */
static void add_residual_shifted(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const ptrdiff_t *k_step,
                                 const X *x, const R *residual, const int32_t *k, const int32_t *shift, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t p = place(i, rank, size, k_step);
        y[i] = (Y)(x[i] + (Y)floor_shift((int64_t)residual[place(i, rank, size, step)] * k[p], shift[p]));
    }
}

/// widen: X Y
static void widen(ptrdiff_t count, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)x[i];
}

/// centre: X Y
/* Section 20: q - zero. */
static void centre(ptrdiff_t count, const X *x, int32_t zero, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)(x[i] - zero);
}

/// negate: X Y
static void negate(ptrdiff_t count, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)(-(Y)x[i]);
}

/// shift_right: X Y
/* floor(q / 2^bits + 1/2). */
static void shift_right(ptrdiff_t count, const X *x, int bits, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)floor_shift((int64_t)x[i] + ((int64_t)1 << (bits - 1)), bits);
}

/// clamp: X Y
/* Section 10. */
static void clamp(ptrdiff_t count, const X *x, int64_t low, int64_t high, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)clip(x[i], low, high);
}

/// lookup: X Y
/* Section 13: the entry of q in a table whose first entry is that of `first`. */
static void lookup(ptrdiff_t count, const X *x, const Y *table, int32_t first, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = table[x[i] - first];
}

/// rectify: X N Y
/* Section 16, PReLU: positive · max(q, 0) + negative · min(q, 0). */
static void rectify(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, int32_t positive,
                    const N *negative, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++)
        y[i] = (Y)(x[i] > 0 ? (int64_t)positive * x[i] : (int64_t)negative[place(i, rank, size, step)] * x[i]);
}

/// scale_channels: X W B Y
/* Section 16, batch norm standing alone: q · w + b. */
static void scale_channels(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, const W *weight,
                           const B *bias, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t p = place(i, rank, size, step);
        y[i] = (Y)((Y)x[i] * (Y)weight[p] + (bias ? (Y)bias[p] : 0));
    }
}

/// truncated: X
/* Section 16, the whole part of a quantized tensor; beyond 64 bits -2^63. */
static void truncated(ptrdiff_t count, const X *x, float scale, float margin, int64_t *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        float q = (float)x[i];
        float real = q * scale;
        float beyond = (q > 0.0f ? margin : q < 0.0f ? -margin : 0.0f);
        float v = real + beyond;
        y[i] = v >= -9223372036854775808.0f && v < 9223372036854775808.0f ? (int64_t)v : INT64_MIN;
    }
}

/// PAIR: A B Y
/* DOCUMENT */
static void PAIR(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *a_step, const ptrdiff_t *b_step, const A *first,
                 const B *second, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const A a = first[place(i, rank, size, a_step)];
        const B b = second[place(i, rank, size, b_step)];
        y[i] = (Y)(EXPRESSION);
    }
}

/// DIVISION: A B
/* DOCUMENT */
static int DIVISION(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *a_step, const ptrdiff_t *b_step, const A *first,
                    const B *second, int64_t *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const int64_t a = first[place(i, rank, size, a_step)], b = second[place(i, rank, size, b_step)];
        if (b == 0) return 1;
        y[i] = EXPRESSION;
    }
    return 0;
}

/// choose: A B C Y
/* a where the condition holds, else b. */
static void choose(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *a_step, const ptrdiff_t *b_step,
                   const ptrdiff_t *c_step, const A *a, const B *b, const C *condition, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        if (condition[place(i, rank, size, c_step)])
            y[i] = (Y)a[place(i, rank, size, a_step)];
        else
            y[i] = (Y)b[place(i, rank, size, b_step)];
    }
}

/// opposite: X Y
static void opposite(ptrdiff_t count, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)!x[i];
}

/// converted: X Y
/* What the type does not hold wraps around. */
static void converted(ptrdiff_t count, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = (Y)x[i];
}
