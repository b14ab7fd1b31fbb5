#include "check.h"

#include "sketch.h"

#include <string.h>

static oomkit_sketch sketch, other;

static int
near(uint64_t value, uint64_t wanted)
{
    uint64_t off = value > wanted ? value - wanted : wanted - value;
    return (double)off <= (double)wanted * 0.02;
}

static void
test_an_empty_one(void)
{
    memset(&sketch, 0, sizeof(sketch));
    CHECK(oomkit_sketch_quantile(&sketch, 0.5) == 0);
    CHECK(oomkit_sketch_quantile(&sketch, 1.0) == 0);
}

static void
test_equal_numbers_are_exact(void)
{
    static const uint64_t values[] = {0,       1,           63,         64,
                                      1000003, 134250496ul, UINT64_MAX, UINT64_MAX - 1};
    unsigned i, n;

    for (i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        memset(&sketch, 0, sizeof(sketch));
        for (n = 0; n < 5; n++) {
            oomkit_sketch_add(&sketch, values[i]);
        }
        CHECK(oomkit_sketch_quantile(&sketch, 0.0) == values[i]);
        CHECK(oomkit_sketch_quantile(&sketch, 0.5) == values[i]);
        CHECK(oomkit_sketch_quantile(&sketch, 1.0) == values[i]);
    }
}

static void
test_quantiles_of_a_ramp(void)
{
    uint64_t scale, i;

    for (scale = 1; scale < (UINT64_C(1) << 50); scale *= 1000) {
        memset(&sketch, 0, sizeof(sketch));
        for (i = 1; i <= 1000; i++) {
            oomkit_sketch_add(&sketch, i * scale);
        }
        CHECK(sketch.count == 1000);
        CHECK(near(oomkit_sketch_quantile(&sketch, 0.50), 500 * scale));
        CHECK(near(oomkit_sketch_quantile(&sketch, 0.95), 950 * scale));
        CHECK(near(oomkit_sketch_quantile(&sketch, 0.0), scale));
        CHECK(near(oomkit_sketch_quantile(&sketch, 1.0), 1000 * scale));
        CHECK(sketch.most == 1000 * scale && sketch.least == scale);
    }
}

static void
test_merged_as_if_added(void)
{
    oomkit_sketch all;
    uint64_t i;

    memset(&sketch, 0, sizeof(sketch));
    memset(&other, 0, sizeof(other));
    memset(&all, 0, sizeof(all));
    oomkit_sketch_merge(&sketch, &other);
    CHECK(memcmp(&sketch, &all, sizeof(all)) == 0);
    for (i = 1; i < 2000; i++) {
        oomkit_sketch_add(i % 3 ? &sketch : &other, i * i * i);
        oomkit_sketch_add(&all, i * i * i);
    }
    oomkit_sketch_merge(&sketch, &other);
    CHECK(memcmp(&sketch, &all, sizeof(all)) == 0);
    memset(&sketch, 0, sizeof(sketch));
    oomkit_sketch_merge(&sketch, &all);
    CHECK(memcmp(&sketch, &all, sizeof(all)) == 0);
}

static void
test_a_range_does_not_wrap(void)
{
    memset(&sketch, 0, sizeof(sketch));
    oomkit_sketch_add(&sketch, 7);
    sketch.ranges[7] = UINT32_MAX;
    oomkit_sketch_add(&sketch, 7);
    CHECK(sketch.ranges[7] == UINT32_MAX && sketch.count == 2);
}

int
main(void)
{
    test_an_empty_one();
    test_equal_numbers_are_exact();
    test_quantiles_of_a_ramp();
    test_merged_as_if_added();
    test_a_range_does_not_wrap();
    return check_report();
}
