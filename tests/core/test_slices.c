#include "check.h"

#include "slices.h"
#include "slices_are.h"

static void
test_slices_by_example(void)
{
    CHECK(SLICES(&((oomkit_plan){7, 3, 0, 1, 0}), 3, 2, 2));
    CHECK(SLICES(&((oomkit_plan){7, 1, 0, 1, 0}), 7));
    CHECK(SLICES(&((oomkit_plan){64, 2, 0, 1, 0}), 32, 32));
    CHECK(SLICES(&((oomkit_plan){3, 9, 0, 1, 0}), 1, 1, 1));
    CHECK(SLICES(&((oomkit_plan){10, 2, 0, 4, 0}), 8, 2));
    CHECK(SLICES(&((oomkit_plan){10, 7, 0, 4, 0}), 4, 4, 2));
    CHECK(SLICES(&((oomkit_plan){3, 5, 0, 8, 0}), 3));
    CHECK(SLICES(&((oomkit_plan){10, 3, 4, 1, 0}), 4, 3, 3));
    CHECK(SLICES(&((oomkit_plan){1024, 2, 717, 1, 0}), 717, 307));
    CHECK(SLICES(&((oomkit_plan){21, 3, 8, 4, 0}), 8, 8, 5));
    CHECK(SLICES(&((oomkit_plan){5, 4, 5, 2, 0}), 5));
}

static void
test_slices_of_every_plan(void)
{
    int64_t batch, k, multiple, first;

    for (batch = 1; batch <= 64; batch++) {
        for (k = 1; k <= batch + 2; k++) {
            for (multiple = 1; multiple <= 8; multiple++) {
                oomkit_plan plan = {batch, k, 0, multiple, 0};
                int64_t units = (batch + multiple - 1) / multiple;
                check_slices(&plan);
                CHECK(oomkit_plan_count(&plan) == (k < units ? k : units));
            }
        }
    }
    for (batch = 1; batch <= 40; batch++) {
        for (k = 2; k <= batch; k++) {
            for (multiple = 1; multiple <= 4; multiple++) {
                for (first = multiple; first < batch; first += multiple) {
                    check_slices(&(oomkit_plan){batch, k, first, multiple, 0});
                }
            }
        }
    }
}

int
main(void)
{
    test_slices_by_example();
    test_slices_of_every_plan();
    return check_report();
}
