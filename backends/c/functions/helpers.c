/// place
/* Where element i of a tensor of these sizes lies in one that moves by `step` elements along each dimension. */
static ptrdiff_t place(ptrdiff_t i, int rank, const ptrdiff_t *size, const ptrdiff_t *step)
{
    ptrdiff_t at = 0;
    for (int d = rank - 1; d > 0; d--) {
        at += i % size[d] * step[d];
        i /= size[d];
    }
    return at + i * step[0];
}

/// floor_shift
/* floor(v / 2^n); C leaves open what >> does with a negative number. */
static int64_t floor_shift(int64_t v, int n)
{
    return v < 0 ? ~(~v >> n) : v >> n;
}

/// clip
static int64_t clip(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

/// half_even
/* The nearest integer, of two equally near the even one; |v| < 2^53. */
static int64_t half_even(double v)
{
    int64_t whole = (int64_t)v;
    double rest = v - (double)whole;
    if (rest > 0.5 || (rest == 0.5 && whole % 2 != 0)) whole++;
    if (rest < -0.5 || (rest == -0.5 && whole % 2 != 0)) whole--;
    return whole;
}

/// considered
/* Section 22: a real number as the grid of its tensor sees it: 0 for NaN and what is below 2^-110, and never beyond 2^126. */
static float considered(float v)
{
    const float size = v < 0.0f ? -v : v;
    if (!(size >= 7.70371977754894343e-34f)) return 0.0f;
    return v > 8.50705917302346159e+37f ? 8.50705917302346159e+37f : v < -8.50705917302346159e+37f ? -8.50705917302346159e+37f : v;
}

/// half_step
/* Section 8, the last rounding of bernoulli: half a step of the output, in steps of the accumulator. */
static int64_t half_step(int32_t shift, int32_t multiplier, int32_t right_shift, int nearest)
{
    const int64_t most = (int64_t)1 << 31;
    int power = shift + right_shift - 1;
    if (multiplier <= 0) return 0;
    if (power > 61) return most;
    int64_t step = (((int64_t)1 << power) + (nearest ? multiplier / 2 : 0)) / multiplier;
    return step < most ? step : most;
}

/// wrapped
/* An integer modulo 2^64, as two's complement. */
static int64_t wrapped(uint64_t v)
{
    return v <= INT64_MAX ? (int64_t)v : -(int64_t)~v - 1;
}

/// remainder_of
/* The remainder that has the sign of the divisor. */
static int64_t remainder_of(int64_t a, int64_t b)
{
    int64_t rest = b == -1 ? 0 : a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

/// window
/* Depth, height and width of an operand, of a result, and of the window that is moved over the one to give the other. */
struct window {
    ptrdiff_t in[3], out[3], kernel[3], stride[3], before[3], dilation[3];
};

/// tap
/* Where tap k of the window at p reads along dimension d; -1 where that is padding. */
static ptrdiff_t tap(const struct window *w, int d, ptrdiff_t p, ptrdiff_t k)
{
    ptrdiff_t at = p * w->stride[d] - w->before[d] + k * w->dilation[d];
    return at < w->in[d] ? at : -1;
}

/// inside
/* A position in steps of 2^-bits of a pixel, brought inside of n pixels: mode 0 leaves it, 1 limits it, 2 reflects it at the ends. */
static int64_t inside(int64_t at, int64_t n, int bits, int mode, int corners)
{
    int64_t pixel = (int64_t)1 << bits, low = corners ? 0 : -pixel / 2, span = corners ? (n - 1) * pixel : n * pixel;
    if (mode == 2) {
        int64_t twice = 2 * (span > 1 ? span : 1), away = (at < low ? low - at : at - low) % twice;
        at = (away < twice - away ? away : twice - away) + low;
    }
    return mode == 0 ? at : clip(at, 0, (n - 1) * pixel);
}
